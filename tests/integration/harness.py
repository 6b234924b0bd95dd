"""A run to be struck: `lachesis up` as a process, real servers, every service a process, a tiny untrained model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Self

import anyio
import torch
from integration.servers import RUN, Servers

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import fetch_batch, follow_ledger
from lachesis.pipeline.model.device import prepare_device
from lachesis.pipeline.model.policy import ModelSetup, build_tiny_policy, load_model, save_policy
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.sequences import training_sequences

__all__ = ["CONFIG", "RUN", "SUMS", "Run", "alive", "trained_in_one_go", "until", "weights_in_one_go"]

SUMS = Path(__file__).parents[1] / "examples" / "sums.py"
CONFIG = """
[environments.sums]
kind = "{sums}:Sums"
samples = 4
max_new_tokens = 8
concurrency = 4
longest_tokens = 64

[evaluation.sums]
kind = "{sums}:Sums"
max_new_tokens = 8

[evaluate]
every_steps = 1000
items = 4

[[scoring.raters]]
rater = "letters:letters"

[[scoring.raters]]
rater = "repetition"

[batching]
batch_size = 16
teacher = "optional"

[teacher]
enabled = true

[training]
steps = {steps}
checkpoint_every = 4

[flow]
lease_s = 3.0

[health]
act = "warn"  # what an untrained model writes would stop any run
"""


def steps_trained(folder: Path) -> int:
    """Steps trained so far by the run in `folder`, by the trainer's own log."""
    file = folder / "metrics.jsonl"
    written = file.read_bytes() if file.exists() else b""
    whole = written[: written.rfind(b"\n") + 1].splitlines()  # the last line may be half written yet
    steps = (json.loads(line).get("train/step") for line in reversed(whole))  # a void batch's line has none
    return int(next(filter(None, steps), 0))


class Run:
    """`lachesis up` as a process in `folder`, on `servers`.

    `sets` are settings besides those of `CONFIG`, `environ` is added to every process's environment, and its
    PYTHONPATH put before what is there.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        servers: Servers,
        *,
        sets: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.steps = steps
        self.servers = servers
        self._sets = dict(sets or {})
        self.config = folder / "run.toml"
        self.config.write_text(CONFIG.format(sums=SUMS, steps=steps))
        paths = [(environ or {}).get("PYTHONPATH"), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        self.environ = {**os.environ, **(environ or {}), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=64), folder / "model")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def arguments(self) -> list[str]:
        """What gives any `lachesis` command the run's configuration."""
        sets = {"folder": self.folder, "model": self.folder / "model", "run": RUN, **self._sets}
        return ["--config", str(self.config), *(f"--set={k}={v}" for k, v in sets.items()), *self.servers.arguments]

    def load_config(self) -> RunConfig:
        """Return the run's configuration as its services see it."""
        sets = [text.removeprefix("--set=") for text in self.arguments if text.startswith("--set=")]
        return load(run_config_type(), file=self.config, environ={}, sets=sets).config

    def start(self) -> None:
        """Start the supervisor."""
        with (self.folder / "up.log").open("ab") as log:
            self.process = self.spawn("up", log=log)

    def spawn(
        self, *command: str, log: object, program: Sequence[str] = ("-m", "lachesis")
    ) -> "subprocess.Popen[bytes]":
        """Start a `lachesis` command on the run, in the background; `program` is what Python runs."""
        return subprocess.Popen(
            [sys.executable, *program, *command, *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self.environ,
        )

    def called(self, *command: str, timeout_s: float = 240) -> tuple[int, str]:
        """Return the exit code of a `lachesis` command on the run, and all that it printed."""
        file = self.folder / "called.log"
        with file.open("wb") as log:
            code = self.spawn(*command, log=log).wait(timeout_s)
        return code, file.read_text(errors="replace")

    def pids(self) -> dict[str, int]:
        """Return every process of the run that is said to run: services, servers, the supervisor."""
        try:
            found: dict[str, int | None] = json.loads((self.folder / "pids.json").read_text())
        except FileNotFoundError:
            found = {}
        return {name: pid for name, pid in found.items() if pid} | dict(self.servers.pids())

    def step(self) -> int:
        """Steps trained so far, by the trainer's own log."""
        return steps_trained(self.folder)

    async def wait_for_step(self, step: int, deadline_s: float = 300.0) -> None:
        """Wait until `step` is trained; fail when the run ends before or takes too long."""
        end = anyio.current_time() + deadline_s
        while self.step() < step:
            assert self.process is not None
            assert self.process.poll() is None, f"the run ended at step {self.step()}:\n{self.tail()}"
            assert anyio.current_time() < end, f"at step {self.step()} of {step} after {deadline_s} s:\n{self.tail()}"
            await anyio.sleep(0.05)

    async def wait_until_back(self, name: str, pid: int) -> None:
        """Wait until another process than `pid` has that name."""
        await until(lambda: self.pids().get(name, pid) != pid, 600)

    async def wait(self, deadline_s: float) -> int:
        """Wait until the supervisor has ended, and return its exit code."""
        process = self.process
        assert process is not None
        await until(lambda: process.poll() is not None, deadline_s)
        assert process.returncode is not None
        return process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the supervisor, and with it the run, if it still goes on."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the supervisor did not end when it was told to:\n{self.tail()}") from None

    def tail(self) -> str:
        return (self.folder / "up.log").read_text(errors="replace")[-3000:]


async def until(condition: Callable[[], bool], deadline_s: float) -> None:
    """Wait until `condition` holds. Raises TimeoutError."""
    with anyio.fail_after(deadline_s):
        while not condition():  # noqa: ASYNC110 - it is about other processes, which offer nothing to wait on
            await anyio.sleep(0.05)


def alive(pid: int) -> bool:
    """Return whether the process runs; one that ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return "Z" not in stat.rpartition(")")[2][:3]


async def trained_in_one_go(bus: Bus, model: Path, steps: int) -> str:
    """Return the digest of the weights after training on the ledger's first batches, in one process, uninterrupted."""
    return weights_digest(await weights_in_one_go(bus, model, steps))


async def weights_in_one_go(bus: Bus, model: Path, steps: int, device: str = "auto") -> dict[str, torch.Tensor]:
    """Return those weights, trained on the device that a trainer with this setting takes, in main memory."""
    policy = load_model(model, ModelSetup(prepare_device(device, 1)))
    learner = Learner(policy.model, LearnerConfig())
    async with aclosing(follow_ledger(bus, RUN, "main", LedgerPosition(), follow=False)) as entries:
        async for entry in entries:
            if entry.batch is None or entry.batch.number >= steps:
                continue
            sequences = []
            for ref, group, teacher in await fetch_batch(bus, entry.batch):
                sequences += training_sequences(ref, group, teacher, TrainerLimits(policy.tokenizer_hash))
            learner.step(pack(sequences, pad_id=policy.tokenizer.pad_token_id))
    assert learner.steps == steps
    return {name: tensor.cpu() for name, tensor in policy_tensors(policy.model).items()}
