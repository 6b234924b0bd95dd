"""How a run stands at one moment: what `status` shows, gathered from the bus in one go.

What goes in: the bus and the run's configuration. What comes out: a `Snapshot`, in which None means "not known" or
"none yet". Nothing is written and no consumer is made.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import anyio
import msgspec
import nats.errors

from lachesis.pipeline.bus.background import background
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.kv import bucket_stream
from lachesis.pipeline.bus.newest import newest
from lachesis.pipeline.bus.streams import StreamDescription
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.secrets import without_secrets
from lachesis.pipeline.evaluation.read import EvaluationReader
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat, PolicyRecord
from lachesis.schemas.errors import DamagedError, InfrastructureError, NotFoundError, SchemaError
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.promotion import Promoted
from lachesis.services.cli.checks.cluster import check_copies
from lachesis.services.connect import SILENCE_S, History, is_trained, other_runs, recent_heartbeats, unknown_run
from lachesis.services.live.evaluations import EvaluationStatus, evaluation_rows, evaluation_warnings
from lachesis.services.live.overview import by_outcome
from lachesis.services.live.progress import newest_figures
from lachesis.services.live.services import ServiceStatus, merge
from lachesis.services.live.store import StoreWarning
from lachesis.services.supervisor import planned_services

__all__ = ["Snapshot", "StreamStatus", "cluster_problems", "server_version", "take"]

_LATE_S = 1.5
"""An answer takes milliseconds: after so long it is asked why there is none."""
_GATHER_S = SILENCE_S
"""Answers that have not come by then are left out."""


class StreamStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stream or bucket; `bytes` of its `max_bytes` budget are taken."""

    name: str
    messages: int
    bytes: int
    max_bytes: int
    first: int
    last: int
    replicas: int


class LedgerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ledger stands: `outcomes` counts groups by what became of them, `age_s` is since its last entry.

    `promoted` is the newest promotion, None: rollouts are judged by the run's configuration.
    """

    index: int
    batches: int
    watermark: int
    outcomes: dict[str, int]
    age_s: float
    promoted: Promoted | None = None


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The newest published weights."""

    version: str
    step: int
    age_s: float


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer has made durable."""

    step: int
    batches: int
    voids: int
    """Batches since the report before of which nothing was trained."""
    dropped: int
    """Groups since the report before that could not be used, in batches that were trained without them."""
    policy_version: str
    checkpoint: str
    age_s: float


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """See the module's docstring. `ended`: nothing of the run goes on, and its services are `ended`, not `silent`.

    `problems`: why something is not known. `streams` None: not known.
    evaluations: the newest of each environment. reward: mean of the newest training step. warnings: held-out rates that
    fell.
    """

    run: str
    ended: bool
    server: str
    server_version: str
    problems: list[str]
    streams: list[StreamStatus] | None
    services: list[ServiceStatus]
    ledger: LedgerStatus | None
    policy: PolicyStatus | None
    trainer: TrainerStatus | None
    evaluations: list[EvaluationStatus] = []
    reward: float | None = None
    warnings: list[str] = []


async def take(history: History, config: RunConfig) -> Snapshot:
    """Return the snapshot, after listening to heartbeats for a moment if the run may go on.

    Takes some seconds at most: what the server does not answer by then is not known, and `problems` says why. Raises
    `NotFoundError` when the server has other runs and knows nothing of this one.
    """
    bus, ended = history
    look = _Look(bus)
    planned = planned_services(config)
    heard: dict[str, Heartbeat] = {}
    reader = EvaluationReader(bus, config)
    await look.gather(
        {
            "others": lambda: other_runs(bus, config),
            "streams": bus.describe_streams,
            **({} if ended else {"beats": lambda: recent_heartbeats(bus, config.run, planned, heard)}),
            "trained": lambda: is_trained(bus, config),
            "ledger": lambda: _ledger(bus, config),
            "policy": lambda: _policy(bus, config),
            "trainer": lambda: _trainer(bus, config),
            "evaluations": reader.catch_up,
        }
    )
    found = look.found
    beats = list(heard.values())
    if not beats and found.get("others"):
        raise unknown_run(config.run, found["others"])
    problems = look.problems
    silent = set(planned) - {beat.service for beat in beats}
    ended = ended or (not beats and bool(found.get("trained")))
    if silent and not ended and not problems:
        problems = await cluster_problems(bus)
    url = bus.client.connected_url
    services = merge(beats, planned, absent="ended" if ended else "unknown" if problems else "silent")
    return Snapshot(
        run=config.run,
        ended=ended,
        server=without_secrets(url.geturl()) if url else "",
        server_version=server_version(bus),
        problems=problems if ended else [*StoreWarning(config).look(), *problems],
        streams=[_stream(stream) for stream in found["streams"]] if "streams" in found else None,
        services=services,
        ledger=found.get("ledger"),
        policy=found.get("policy"),
        trainer=found.get("trainer"),
        evaluations=evaluation_rows(reader.evaluations),
        reward=_reward(services, config),
        warnings=list(evaluation_warnings(reader.evaluations, config.path).values()),
    )


def _reward(services: list[ServiceStatus], config: RunConfig) -> float | None:
    told = (row.metrics.get("reward/mean") for row in services if row.service == "trainer")
    return next((value for value in told if value is not None), newest_figures(config.path).get("reward/mean"))


class _Look:
    """Asks several things at once, and why there is no answer once one is late."""

    def __init__(self, bus: NatsBus) -> None:
        self.found: dict[str, Any] = {}
        self.problems: list[str] = []
        self._bus = bus

    async def gather(self, questions: Mapping[str, Callable[[], Awaitable[Any]]]) -> None:
        """Take in each answer; what has none within `_GATHER_S` is left out."""
        left = set(questions)
        done = anyio.Event()

        async def ask(name: str, question: Callable[[], Awaitable[Any]]) -> None:
            with suppress(InfrastructureError):
                try:
                    self.found[name] = await question()
                except NotFoundError:
                    pass  # no such stream yet
                except (DamagedError, SchemaError) as error:
                    self.problems.append(str(error))
                left.discard(name)
            if not left:
                done.set()

        async def explain() -> None:
            await anyio.sleep(_LATE_S)
            if left - {"beats"}:
                reason = await self._bus.explain(subjects.LEDGER)
                self.problems.append(f"{reason}; what is missing here is not known")

        async with background() as tasks:
            tasks.start_soon(explain)
            for name, question in questions.items():
                tasks.start_soon(ask, name, question)
            with anyio.move_on_after(_GATHER_S):
                await done.wait()


async def cluster_problems(bus: NatsBus) -> list[str]:
    """Return what is wrong with the servers of a cluster, as `doctor` sees it."""
    infos: dict[str, dict[str, Any]] = {}
    with suppress(nats.errors.Error):
        for name in (*subjects.STREAMS, *map(bucket_stream, subjects.BUCKETS.values())):
            answer = await bus.client.request(f"$JS.API.STREAM.INFO.{name}", b"", timeout=_LATE_S)
            infos[name] = msgspec.json.decode(answer.data)
    return [f"{finding.text}; {finding.mend}" for finding in check_copies(infos) if finding.mend]


def server_version(bus: NatsBus) -> str:
    """Return the version of the server that the bus is connected to."""
    version = bus.client.connected_server_version
    return f"{version.major}.{version.minor}.{version.patch}"


def _stream(stream: StreamDescription) -> StreamStatus:
    usage = stream.usage
    return StreamStatus(
        name=stream.name,
        messages=usage.messages,
        bytes=usage.bytes,
        max_bytes=usage.max_bytes,
        first=usage.first,
        last=usage.last,
        replicas=stream.replicas,
    )


async def _ledger(bus: NatsBus, config: RunConfig) -> LedgerStatus | None:
    run, trainer = config.run, config.training.name
    entry, seq, _ = await newest(
        bus,
        subjects.LEDGER,
        subjects.ledger(run, trainer),
        LedgerEntry,
        lambda one: (one.run, one.trainer) == (run, trainer),
    )
    if entry is None:
        return None
    return LedgerStatus(
        index=entry.index,
        batches=entry.next_batch,
        watermark=entry.watermark,
        outcomes=by_outcome(entry.totals),
        age_s=_age((await bus.get(subjects.LEDGER, seq)).time_ns),
        promoted=entry.promoted or None,
    )


async def _policy(bus: NatsBus, config: RunConfig) -> PolicyStatus | None:
    entry = await bus.value(subjects.BUCKETS["policy"], config.run)
    if entry is None:
        return None
    record = decode(PolicyRecord, entry.value)
    return PolicyStatus(version=record.version, step=record.policy_version.step, age_s=_age(record.written_ns))


async def _trainer(bus: NatsBus, config: RunConfig) -> TrainerStatus | None:
    trainer = config.training.name
    subject = subjects.state(config.run, "trainer", subjects.LIVE, trainer)
    report, seq, _ = await newest(bus, subjects.LEDGER, subject, TrainReport, lambda one: one.run == config.run)
    if report is None:
        return None
    return TrainerStatus(
        step=report.step,
        batches=report.next_batch,
        voids=len(report.voids),
        dropped=sum(len(drops.seqs) for drops in report.drops),
        policy_version=report.policy_version,
        checkpoint=report.checkpoint,
        age_s=_age((await bus.get(subjects.LEDGER, seq)).time_ns),
    )


def _age(then_ns: int) -> float:
    return round((time.time_ns() - then_ns) / 1e9, 3)
