"""Finds one rollout in the streams by its id, or by any part of it.

What goes in: the bus, open for reading. What comes out: a `Rollout`. Ids begin with the time at which they were made,
so that of a long beginning only what is about as old is read: a stream is entered from its end, in steps that grow.
"""

from collections.abc import Sequence

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, RewardEvent, ScoreEvent, TeacherEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import ConfigError, NotFoundError, SchemaError
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.plan import PLAN_HEADER, Plan
from lachesis.services.observe.rollout import RolloutTimeline

__all__ = ["find_rollout", "start_at"]

_HEX = frozenset("0123456789abcdef")
_ID_DIGITS = 32
_TIME_DIGITS = 12
_SKEW_NS = 60_000_000_000
"""How far a producer's clock may be ahead of the server's."""
_REACH_MESSAGES = 1024
_MAX_MATCHES = 5
_EVENTS: dict[str, type[ScoreEvent | RewardEvent | TeacherEvent | DeadLetter]] = {
    "score": ScoreEvent,
    "reward": RewardEvent,
    "teacher": TeacherEvent,
    "dead": DeadLetter,
}


async def find_rollout(bus: Bus, config: RunConfig, name: str) -> RolloutTimeline:
    """Return the rollout whose id is `name` or has it in it.

    Raises `ConfigError` where that is no part of an id or fits several, `NotFoundError` where nothing fits.
    """
    name = name.lower()
    if not name or len(name) > _ID_DIGITS or not _HEX.issuperset(name):
        raise ConfigError(f"{name[:80]!r} is no group id: 32 hex digits, or any part of them")
    rollout = await _member(bus, config, name)
    rollout.revision = config.revision
    await _ledger(bus, config, rollout)
    dead = rollout.outcome is not None and rollout.outcome.kind == "dead"
    if rollout.entry is None or dead or not rollout.stamps():
        await _annotations(bus, config, rollout)
    return rollout


async def start_at(bus: Bus, stream: str, filters: Sequence[str], time_ns: int) -> int:
    """Return a sequence at or before the first message stored at `time_ns` or later, not far before it."""
    usage = await bus.usage(stream)
    reach = _REACH_MESSAGES
    while (start := usage.last - reach + 1) > usage.first:
        async with bus.read(stream, filters, start=start, headers_only=True, follow=False) as messages:
            async for message in messages:
                if message.time_ns < time_ns:
                    return start
                break
        reach *= 8
    return usage.first


async def _member(bus: Bus, config: RunConfig, name: str) -> RolloutTimeline:
    found: list[RolloutTimeline] = []
    if len(name) >= _TIME_DIGITS:
        made_ns = int(name[:_TIME_DIGITS], 16) * 1_000_000
        start = await start_at(bus, subjects.ROLLOUTS, [subjects.rollout(config.run)], made_ns - _SKEW_NS)
        found = await _members(bus, config, name, start)
    if not found and len(name) < _ID_DIGITS:
        found = await _members(bus, config, name, 1)
    if not found:
        raise NotFoundError(
            f"no rollout of run {config.run} has an id with {name} in it: it is not stored yet, was given up before "
            "it was, or history was trimmed that far; `lachesis tail rollout` and `lachesis top` show ids"
        )
    if len(found) > 1:
        some = ", ".join(rollout.plan.group for rollout in found[:_MAX_MATCHES])
        raise ConfigError(f"{name} fits {len(found)} rollouts or more: {some}; give more digits")
    return found[0]


async def _members(bus: Bus, config: RunConfig, name: str, start: int) -> list[RolloutTimeline]:
    """Return the rollouts from `start` on whose ids have `name` in them, no more than are needed to say so."""
    found: dict[str, RolloutTimeline] = {}
    filters = [subjects.rollout(config.run)]
    async with bus.read(subjects.ROLLOUTS, filters, start=start, headers_only=True, follow=False) as messages:
        async for message in messages:
            rollout = _read_member(message)
            if rollout is not None and name in rollout.plan.group:
                found.setdefault(rollout.plan.group, rollout)
                if len(name) == _ID_DIGITS or len(found) > _MAX_MATCHES:
                    break
    return list(found.values())


def _read_member(message: StoredMessage) -> RolloutTimeline | None:
    _, _, run, env = message.subject.split(".")
    try:
        plan = Plan.unpack(message.headers.get(PLAN_HEADER))
    except SchemaError:
        return None  # no rollout: a stage has written a dead letter of it
    return RolloutTimeline(run, env, message.seq, plan, message.time_ns)


async def _ledger(bus: Bus, config: RunConfig, rollout: RolloutTimeline) -> None:
    trainer = config.training.name
    ledger = subjects.ledger(config.run, trainer)
    filters = [ledger, subjects.state(config.run, "trainer", subjects.LIVE, trainer)]
    start = await start_at(bus, subjects.LEDGER, filters, rollout.stored_ns)
    async with bus.read(subjects.LEDGER, filters, start=start, follow=False) as messages:
        async for message in messages:
            try:
                if message.subject == ledger:
                    rollout.ledger(decode(LedgerEntry, message.data))
                else:
                    rollout.report(decode(TrainReport, message.data))
            except SchemaError:
                continue  # what cannot be read tells nothing of this rollout
            if rollout.ended:
                return


async def _annotations(bus: Bus, config: RunConfig, rollout: RolloutTimeline) -> None:
    kinds: tuple[subjects.Kind, ...] = ("score", "reward", "teacher", "dead")
    filters = [subjects.event(kind, config.run, config.revision, rollout.env) for kind in kinds]
    start = await start_at(bus, subjects.EVENTS, filters, rollout.stored_ns)
    async with bus.read(subjects.EVENTS, filters, start=start, follow=False) as messages:
        async for message in messages:
            try:
                rollout.annotation(decode(_EVENTS[message.subject.split(".")[1]], message.data))
            except SchemaError:
                continue
