"""One round: a run is started, struck by a schedule, left in peace until all is settled, stopped and audited."""

import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio
import psutil
from chaos import ledger_checks, leftovers
from chaos.history import History, read_history
from chaos.judge import Verdict, judge
from chaos.mutations import SMALL_CHUNK_BYTES
from chaos.recovery import Observer, observe
from chaos.schedule import SERVER, SUPERVISOR, Strike, schedule
from chaos.strikes import Striker, Tally
from integration.cluster.nodes import Cluster
from integration.harness import RUN, Run, until
from integration.servers import Servers, Standalone, Supervised

from lachesis.pipeline.bus import blobs
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, leaves
from lachesis.services.planned_processes import planned_processes

__all__ = ["TIGHT", "Kind", "Round", "play"]

_TESTS = Path(__file__).parents[1]
_SETS = {
    "services.scorers": 2,
    "services.drain_s": 5.0,
    "evaluate.every_steps": 20,
    **{f"streams.{name}_bytes": 1 << 28 for name in ("rollouts", "events", "replay", "teacher", "ledger")},
    "streams.bucket_bytes": 16 << 20,
    "flow.retention.orphans_after_s": 3,
}


TIGHT = {
    "streams.rollouts_bytes": 1 << 20,
    "streams.events_bytes": 2 << 20,
    "streams.teacher_bytes": 1 << 20,
    "flow.retention.trim_at": 0.1,
    "flow.retention.trim_to": 0.05,
}
"""So little room that history is trimmed all the time."""

Kind = Literal["supervised", "standalone", "cluster"]


@dataclass
class Round:
    """What one round is to be, and what came of it."""

    seed: int
    kills: int
    pause_s: float = 0.8
    servers: Kind = "supervised"
    """The supervisor's own server; one beside the run, with connections that can be cut; or three nodes."""
    patches: Sequence[str] = ()
    """Names of `mutations.PATCHES` that every process of the run is started with."""
    sets: Mapping[str, object] = field(default_factory=dict)
    """Settings besides the usual ones."""
    strikes: Sequence[Strike] | None = None
    """What is struck; None: what the seed says."""
    progress_s: float = 300.0
    """How long the run may take, once it is left in peace, for its next steps, and then to settle."""
    settled: int | None = None
    """The last rollout stored before the run came to rest."""
    late: int = 0
    tally: Tally = field(default_factory=Tally)
    verdict: Verdict = field(default_factory=Verdict)


async def play(this: Round, folder: Path) -> None:
    """Play a round in `folder`, a new one, and fill in what came of it."""
    witness = folder / "acknowledged.log"
    environ = {
        "PYTHONPATH": os.pathsep.join([str(_TESTS / "chaos" / "child"), str(_TESTS)]),
        "CHAOS_WITNESS": str(witness),
        "CHAOS_PATCHES": ",".join(this.patches),
    }
    async with _servers(this, folder) as servers:
        run = Run(folder, 1_000_000, servers, sets={**_SETS, **this.sets}, environ=environ)
        try:
            run.start()
            await _struck(this, run)
        except* (TimeoutError, AssertionError, InfrastructureError) as errors:
            this.verdict.blame("goes on", [f"{error!r}\n{run.tail()}" for error in leaves(errors)])
        finally:
            _end(run)
        with _reading("small_chunks" in this.patches):
            async with servers.afterwards("audit") as bus:
                verdict = await judge(bus, run, witness, settled=this.settled, late=this.late)
        for check, found in this.verdict.violations.items():
            verdict.blame(check, found)
        this.verdict = verdict
    this.verdict.blame("recovery", this.tally.lost)


@contextmanager
def _reading(small_chunks: bool) -> Iterator[None]:
    """Read as the run wrote: how many chunks a message may have depends on their size."""
    usual = blobs.CHUNK_BYTES
    if small_chunks:
        blobs.CHUNK_BYTES = SMALL_CHUNK_BYTES  # type: ignore[misc]
    try:
        yield
    finally:
        blobs.CHUNK_BYTES = usual  # type: ignore[misc]


@asynccontextmanager
async def _servers(this: Round, folder: Path) -> AsyncIterator[Servers]:
    if this.servers == "standalone":
        async with Standalone.run(folder) as servers:
            yield servers
    elif this.servers == "cluster":
        with Cluster(folder / "nodes") as cluster:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cluster.keep)
                yield cluster
                tasks.cancel_scope.cancel()
    else:
        yield Supervised(folder)


async def _struck(this: Round, run: Run) -> None:
    """Strike the run, let it go on and settle, and stop it."""
    config = run.load_config()
    targets = [SERVER, SUPERVISOR, *(planned.name for planned in planned_processes(config))]
    strikes = this.strikes
    if strikes is None:
        connections = bool(run.servers.proxies)
        strikes = schedule(this.seed, targets, kills=this.kills, pause_s=this.pause_s, connections=connections)
    await run.wait_for_step(2)
    async with observe(run.servers) as observer, anyio.create_task_group() as tasks:
        striker = Striker(run, observer, tasks)
        this.tally = striker.tally
        for strike in strikes:
            if this.strikes is not None:  # they are to hurt, and what is still to start is not hurt
                await striker.up(strike.target)
            await anyio.sleep(strike.after_s)
            await striker.strike(strike)
        await striker.recovered()
        await run.wait_for_step(run.step() + 3, this.progress_s)
        await _settle(this, run, observer)
        this.late = observer.late
    assert run.process is not None
    run.process.terminate()
    code = await run.wait(200)
    if code != 0:
        this.verdict.blame("ends", [f"the supervisor ended with code {code}:\n{run.tail()}"])
    with suppress(TimeoutError):  # services of a supervisor that was killed may still drain
        await until(lambda: not _left(run), config.services.drain_s + 60.0)
    this.verdict.blame("processes", [f"{process} still runs" for process in _left(run)])


async def _settle(this: Round, run: Run, observer: Observer) -> None:
    """Stop the environments as if they had died silently; wait until their leases ran out and nothing is under way."""
    config = run.load_config()
    stopped = [pid for name, pid in run.pids().items() if name.startswith("environment-")]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    with anyio.move_on_after(this.progress_s):
        while _is_busy(history := await read_history(observer.bus, RUN), config):  # noqa: ASYNC110
            await anyio.sleep(0.5)  # the streams say when they are quiet only to their readers
        this.settled = max((rollout.seq for rollout in history.rollouts), default=0)
    observer.governor = None
    with anyio.move_on_after(config.flow.lease_s + 60.0):
        await observer.wait(lambda: not leftovers.leases(observer.governor))
    this.verdict.blame("leases", leftovers.leases(observer.governor))
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _is_busy(history: History, config: RunConfig) -> bool:
    """Whether something is still to come: an outcome, or the deletion of what a dead producer had begun to store."""
    return bool(ledger_checks.outcomes(history, config.batching) or leftovers.chunks(history))


def _left(run: Run) -> list[psutil.Process]:
    """Return what still runs of it, servers of their own apart."""
    return leftovers.processes(run.folder, () if run.servers.supervised else run.servers.pids().values())


def _end(run: Run) -> None:
    """End whatever still runs; of a round that went well nothing does."""
    for process in _left(run):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if run.process is not None:
        run.process.wait()
