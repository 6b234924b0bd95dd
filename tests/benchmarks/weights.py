"""How long weights take out of a trainer and into a server, in units of a plain copy of the same bytes.

    .venv/bin/python tests/benchmarks/weights.py [--million 134] [--dtype float32|bfloat16] [--device cpu|cuda]

Stop: the copy that the trainer waits for, until its next step may change the weights. Out: from the copy to the file
under its name, digested and synced, beside safetensors' `save_file` with a sync and without. In: the file into memory,
checked, and on into the model, beside a copy of the same bytes into new memory. Each line is the best of a few
interleaved rounds; ratios are those of each round, their median, and the least and the most in brackets.
Readers: so many readers of one file at once, and what the disk read meanwhile (0: it was read once, or not at all).
Trainer: the trainer's own publisher, on a bus in memory: how long a step waits for it, how long until the policy record
is there, and the longest time that the event loop did not turn.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import anyio
import torch
from safetensors.torch import save_file
from speed.figures import Figure, write_figures

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.fsync import fsync
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.trainer_settings import trainer_settings
from lachesis.pipeline.model.host_memory import HostCopies
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.model.replace_tensors import replace_tensors
from lachesis.pipeline.model.safetensors_files import DTYPES, read_raw
from lachesis.pipeline.model.tensors import rounded, weights_digest
from lachesis.pipeline.model.weight_files import read_weights, write_new_weights
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.pipeline.trainer.publication import PolicyPublisher
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.schemas.ids import PolicyVersion

ROWS = 4096


def a_model(million: float, device: str) -> dict[str, torch.Tensor]:
    """Return tensors in a language model's proportions: an embedding of a fifth, and layers of seven matrices."""
    width = 1024
    embedding = int(million * 1e6 / 5 / width)
    tensors = {"embed.weight": torch.randn(embedding, width, device=device)}
    layers = max(1, int((million * 1e6 - embedding * width) / (7 * ROWS * width)))
    for layer in range(layers):
        tensors |= {f"layers.{layer}.{part}.weight": torch.randn(ROWS, width, device=device) for part in "qkvogud"}
        tensors[f"layers.{layer}.norm.weight"] = torch.ones(width, device=device)
    return tensors


class Took(NamedTuple):
    """Wall time and CPU time of all threads, seconds: on a busy machine the second tells more."""

    wall: float
    cpu: float


def in_turn(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[Took]]:
    """Return the times of each; all take turns."""
    found: dict[str, list[Took]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, one in work.items():
            wall, cpu = time.perf_counter(), time.process_time()
            one()
            found[name].append(Took(time.perf_counter() - wall, time.process_time() - cpu))
    return found


def median_ratio(ones: list[Took], others: list[Took]) -> float:
    return median(one.wall / other.wall for one, other in zip(ones, others, strict=True))


def ratio(ones: list[Took], others: list[Took]) -> str:
    wall = [one.wall / other.wall for one, other in zip(ones, others, strict=True)]
    cpu = [one.cpu / other.cpu for one, other in zip(ones, others, strict=True)]
    return f"{median(wall):.2f} [{min(wall):.2f}, {max(wall):.2f}], CPU {median(cpu):.2f}"


def read_in_process(path: str, version: str, queue: "multiprocessing.Queue[float]") -> None:
    forms = {
        name: torch.empty(form.shape, dtype=getattr(torch, DTYPES[form.dtype][0]), device="meta")
        for name, form in read_raw(Path(path)).forms.items()
    }
    started = time.perf_counter()
    read_weights(path, PolicyVersion.parse(version), forms)
    queue.put(time.perf_counter() - started)


async def publish(tensors: dict[str, torch.Tensor], dtype: str, folder: Path, rounds: int) -> None:
    """Publish versions with the trainer's publisher and print what that took."""
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor, requires_grad=False))
    config = RunConfig(run="r", folder=str(folder), weights=WeightsConfig(dtype=dtype))
    budgets = StreamsConfig().budgets()
    stops, outs, lags = [], [], []
    async with MemoryBus(max_bytes=budgets) as bus, background() as tasks:
        feed = await BatchFeed.open(bus, "r", "main", term="t")
        service = Service(bus, "trainer", "r")
        policy = PolicyModel(model, None, "tokenizer")
        publisher = PolicyPublisher(
            service, trainer_settings(config), feed, policy, tasks, lineage="a", vocabulary=None
        )

        async def turn() -> None:
            while True:
                before = time.perf_counter()
                await anyio.sleep(0.001)
                lags.append(time.perf_counter() - before - 0.001)

        tasks.start_soon(turn)
        for step in range(rounds + 1):
            lags.clear()
            started = time.perf_counter()
            await publisher.publish(step)
            stops.append(time.perf_counter() - started)
            await publisher.finish()
            outs.append(time.perf_counter() - started)
            await anyio.sleep(0.01)
        print(
            f"trainer: a step waits {min(stops[1:]):.3f} s ({stops[0]:.3f} s the first time), the record is there "
            f"after {min(outs[1:]):.3f} s; the event loop stood still for {max(lags):.3f} s at most"
        )


def sectors_read() -> int:
    """Return what all disks of this machine have read, bytes."""
    rows = [line.split() for line in Path("/proc/diskstats").read_text().splitlines()]
    return 512 * sum(int(row[5]) for row in rows if not row[2].startswith(("loop", "ram", "dm-")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=134, help="parameters")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="that weights travel in")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the ratios here")
    options = parser.parse_args()
    tensors = a_model(options.million, options.device)
    sent = rounded(tensors, options.dtype)
    host = {name: tensor.cpu() for name, tensor in sent.items()}
    served = torch.nn.Module()
    for number, tensor in enumerate(tensors.values()):
        served.register_parameter(f"p{number}", torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False))
    held = dict(zip(tensors, served.parameters(), strict=True))
    expected = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    warm = {name: torch.zeros_like(tensor) for name, tensor in host.items()}
    copies = HostCopies()
    copies.copy(tensors, options.dtype)
    size = sum(tensor.nbytes for tensor in host.values())
    cores = len(os.sched_getaffinity(0))
    print(f"{size / 1e6:.0f} MB in {len(tensors)} tensors, {options.dtype}, {options.device}, {cores} cores")

    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        written: list[tuple[PolicyVersion, Path]] = []

        def synced() -> None:
            save_file(host, folder / "plain.safetensors")
            fsync(folder / "plain.safetensors")

        def out() -> None:
            taken = copies.copy(tensors, options.dtype)
            written[:] = [write_new_weights(taken, folder, 1, "a", options.dtype)]

        def come_in() -> None:
            replace_tensors(served, held, read_weights(written[0][1], written[0][0], expected))

        took = in_turn(
            {
                "copy": lambda: [tensor.clone() for tensor in host.values()],
                "copy over": lambda: [warm[name].copy_(tensor) for name, tensor in host.items()],
                "stop": lambda: copies.copy(tensors, options.dtype),
                "digest": lambda: weights_digest(host),
                "save_file": lambda: save_file(host, folder / "plain.safetensors"),
                "save_file, synced": synced,
                "out": out,
                "read": lambda: read_weights(written[0][1], written[0][0], expected),
                "in": come_in,
            },
            options.rounds,
        )
        for name, times in took.items():
            wall, cpu = min(one.wall for one in times), min(one.cpu for one in times)
            print(f"{name:20} {wall:7.3f} s  {wall / size * 1e9:6.2f} s/GB, CPU {cpu:7.3f} s")
        pairs = (
            ("stop", "copy over"), ("stop", "copy"), ("out", "save_file"), ("out", "save_file, synced"),
            ("read", "copy"), ("in", "copy"), ("in", "copy over"),
        )  # fmt: skip
        for one, other in pairs:
            print(f"{one} / {other}: {ratio(took[one], took[other])}")
        ratios = [
            Figure("weights", f"{one} / {other}", "times", median_ratio(took[one], took[other])) for one, other in pairs
        ]
        write_figures(options.json, ratios)

        version, path = written[0]
        fresh = multiprocessing.get_context("spawn")
        queue: multiprocessing.Queue[float] = fresh.Queue()
        before = sectors_read()
        readers = [fresh.Process(target=read_in_process, args=(str(path), str(version), queue)) for _ in range(3)]
        for one in readers:
            one.start()
        times = [queue.get() for _ in readers]
        for one in readers:
            one.join()
        anyio.run(publish, tensors, options.dtype, folder / "run", options.rounds)
        print(f"3 readers at once: {max(times):.3f} s, {(sectors_read() - before) / size:.2f} of the bytes from a disk")


if __name__ == "__main__":
    main()
