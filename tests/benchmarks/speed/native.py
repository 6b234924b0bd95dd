"""Our own pipeline under measurement: each service, the server and both ends are processes of their own."""

import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from speed.clients import Phase, PhaseResult
from speed.figures import Figure, Snapshot, cost_of
from speed.processes import Processes, snapshot

from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.embedded import EmbeddedServer, read_endpoint

__all__ = ["EVERY_SERVICE", "SERVICES", "Load", "figures_of", "measure_idle", "measure_native"]

SERVICES = ("governor", "scorer", "normalizer", "batcher")
EVERY_SERVICE = (*SERVICES, "curriculum", "health")
_PATIENCE_S = 900.0
_SETTLE_S = 15.0
"""Seconds after which services that were started do nothing more."""
_CLIENTS = ("-m", "speed.clients")
_CONFIG = """
run = "bench"
mode = "observe"
inference.policy.url = "http://127.0.0.1:9"
folder = "{folder}"
[nats]
url = "{url}"
token_file = "{token}"
[streams]
rollouts_bytes = 21474836480
[batching]
batch_size = {batch}
max_staleness = {staleness}
[[scoring.raters]]
rater = "speed.raters:length"
[[scoring.raters]]
rater = "speed.raters:stopped"
[[scoring.raters]]
rater = "speed.raters:tail"
"""
_ENVIRONMENT = """
[environments.{name}]
kind = "gateway"
samples = {samples}
longest_tokens = {tokens}
"""


class Load(msgspec.Struct, frozen=True):
    """Groups of `samples` x `tokens` tokens from `envs` environments, in batches of `batch` groups."""

    samples: int = 8
    tokens: int = 1024
    envs: int = 1
    batch: int = 16

    def __str__(self) -> str:
        where = "" if self.envs == 1 else f", {self.envs} environments"
        return f"{self.samples}x{self.tokens}{where}, batches of {self.batch}"


@asynccontextmanager
async def _started(
    tree: Path, load: Load, services: Sequence[str], *, staleness: int = 1_000_000
) -> AsyncIterator[tuple[Processes, list[str]]]:
    """Run a server and services of `tree`; yield them and the arguments that both ends have in common."""
    with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as place:
        folder = Path(place)
        async with EmbeddedServer(folder / "nats", ServerConfig(max_file_bytes=32 << 30)) as server:
            (folder / "token").write_text(server.token)
            (folder / "token").chmod(0o600)
            envs = [f"env{n}" for n in range(load.envs)]
            config = _CONFIG.format(
                folder=folder / "run",
                url=server.url,
                token=folder / "token",
                batch=load.samples * load.batch,
                staleness=staleness,
            )
            sizes = {"samples": load.samples, "tokens": load.tokens}
            config += "".join(_ENVIRONMENT.format(name=env, **sizes) for env in envs)
            (folder / "run.toml").write_text(config)
            processes = Processes(folder, tree)
            with processes.ending():
                processes.start("init", ["-m", "lachesis", "init", "--config", "run.toml"])
                await anyio.to_thread.run_sync(processes.finish, "init", _PATIENCE_S)
                del processes.running["init"]
                for service in services:
                    processes.start(service, ["-m", "lachesis", "run", service, "--config", "run.toml"])
                yield processes, [
                    "--url", server.url, "--token-file", str(folder / "token"), "--envs", ",".join(envs),
                    "--samples", str(load.samples), "--tokens", str(load.tokens),
                ]  # fmt: skip


def _server_pid(processes: Processes) -> int:
    return read_endpoint(processes.folder / "nats").pid


async def measure_native(
    tree: Path, load: Load, phases: Sequence[Phase], services: Sequence[str] = SERVICES
) -> list[PhaseResult]:
    """Run the phases one after the other through the pipeline of `tree` and return what the consumer saw."""
    async with _started(tree, load, services) as (processes, common):
        common += ["--phases", msgspec.json.encode(phases).decode()]
        out = processes.folder / "out.json"
        heard, said = os.pipe()
        processes.start("producer", [*_CLIENTS, "produce", *common], stdin=heard)
        os.close(heard)
        pids = {**processes.pids, "nats-server": _server_pid(processes)}
        given = ",".join(f"{name}={pid}" for name, pid in pids.items())
        consumer = [*_CLIENTS, "consume", *common, "--pids", given, "--out", str(out)]
        processes.start("consumer", consumer, stdout=said)
        os.close(said)
        await anyio.to_thread.run_sync(processes.finish, "consumer", _PATIENCE_S)
        return msgspec.json.decode(out.read_bytes(), type=list[PhaseResult])


def figures_of(scenario: str, result: PhaseResult, samples: int) -> list[Figure]:
    """Return rates, cost and latencies of one phase."""
    scenario = f"{scenario}, {result.phase}"
    found = cost_of(scenario, result.before, result.after, samples)
    for name, values in (
        ("publish to trainer", result.latencies_s),
        ("publish to trainer, youngest", result.youngest_s),
    ):
        found += [
            Figure(scenario, f"{name}, p{quantile}", "ms", 1e3 * float(np.quantile(values, quantile / 100)))
            for quantile in (50, 99)
        ]
    found += [Figure(scenario, f"memory, {name}", "MB", size / 1e6) for name, size in result.after.resident.items()]
    return found


async def measure_idle(tree: Path, load: Load, seconds: float, waiting: int) -> tuple[Snapshot, Snapshot]:
    """Let a run stand still: `waiting` producers want leases that the governor cannot grant.

    Return snapshots at the begin and the end of it.
    """
    async with _started(tree, load, EVERY_SERVICE, staleness=0) as (processes, common):
        # as many as a batch has are granted, and held
        processes.start("producer", [*_CLIENTS, "produce", *common, "--wait", str(load.batch + waiting)])
        pids = {**processes.pids, "nats-server": _server_pid(processes)}
        await anyio.sleep(_SETTLE_S)  # starts are no part of it
        first = snapshot(pids)
        await anyio.sleep(seconds)
        for name, process in processes.running.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended: {processes.log(name)}")
        return first, snapshot(pids)
