"""How a run stands at one moment: what `status` shows, gathered from the bus in one go.

What goes in: the bus and the run's configuration. What comes out: a `Snapshot`, in which None means "not known" or
"none yet". Nothing is written and no consumer is made.
"""

import time

import anyio
import msgspec

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.streams import StreamDescription
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.secrets import without_secrets
from lachesis.pipeline.evaluation.read import EvaluationReader
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.promotion import Promoted
from lachesis.services.connect import History, is_trained, recent_heartbeats
from lachesis.services.live.evaluations import EvaluationStatus, evaluation_rows, evaluation_warnings
from lachesis.services.live.overview import by_outcome
from lachesis.services.live.progress import newest_figures
from lachesis.services.live.services import ServiceStatus, merge
from lachesis.services.supervisor import planned_services

__all__ = ["Snapshot", "StreamStatus", "server_version", "take"]

_EVALUATIONS_S = 3.0
"""Seconds that the server has to send the evaluations."""


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
    policy_version: str
    checkpoint: str
    age_s: float


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """See the module's docstring. `ended`: nothing of the run goes on, and its services are `ended`, not `silent`.

    evaluations: the newest of each environment. reward: mean of the newest training step. warnings: held-out rates that
    fell.
    """

    run: str
    ended: bool
    server: str
    server_version: str
    streams: list[StreamStatus]
    services: list[ServiceStatus]
    ledger: LedgerStatus | None
    policy: PolicyStatus | None
    trainer: TrainerStatus | None
    evaluations: list[EvaluationStatus] = []
    reward: float | None = None
    warnings: list[str] = []


async def take(history: History, config: RunConfig) -> Snapshot:
    """Return the snapshot, after listening to heartbeats for a moment if the run may go on."""
    bus, ended = history
    beats = [] if ended else await recent_heartbeats(bus, config.run, planned_services(config))
    streams = await bus.describe_streams()
    names = {stream.name for stream in streams}
    url = bus.client.connected_url
    ended = ended or (not beats and await is_trained(bus, config))
    services = merge(beats, planned_services(config), absent="ended" if ended else "silent")
    reader = EvaluationReader(bus, config)
    if subjects.EVENTS in names:
        with anyio.move_on_after(_EVALUATIONS_S):
            await reader.catch_up()
    return Snapshot(
        run=config.run,
        ended=ended,
        server=without_secrets(url.geturl()) if url else "",
        server_version=server_version(bus),
        streams=[_stream(stream) for stream in streams],
        services=services,
        ledger=await _ledger(bus, config) if subjects.LEDGER in names else None,
        policy=await _policy(bus, config) if f"KV_{subjects.BUCKETS['policy']}" in names else None,
        trainer=await _trainer(bus, config) if subjects.LEDGER in names else None,
        evaluations=evaluation_rows(reader.evaluations),
        reward=_reward(services, config),
        warnings=list(evaluation_warnings(reader.evaluations, config.path).values()),
    )


def _reward(services: list[ServiceStatus], config: RunConfig) -> float | None:
    told = (row.metrics.get("reward/mean") for row in services if row.service == "trainer")
    return next((value for value in told if value is not None), newest_figures(config.path).get("reward/mean"))


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
    stored = await bus.last(subjects.LEDGER, subjects.ledger(config.run, config.training.name))
    if stored is None:
        return None
    entry = decode(LedgerEntry, stored.data)
    return LedgerStatus(
        index=entry.index,
        batches=entry.next_batch,
        watermark=entry.watermark,
        outcomes=by_outcome(entry.totals),
        age_s=_age(stored.time_ns),
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
    stored = await bus.last(subjects.LEDGER, subjects.state(config.run, "trainer", subjects.LIVE, trainer))
    if stored is None:
        return None
    report = decode(TrainReport, stored.data)
    return TrainerStatus(
        step=report.step,
        batches=report.next_batch,
        voids=len(report.voids),
        policy_version=report.policy_version,
        checkpoint=report.checkpoint,
        age_s=_age(stored.time_ns),
    )


def _age(then_ns: int) -> float:
    return round((time.time_ns() - then_ns) / 1e9, 3)
