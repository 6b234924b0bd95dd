"""Finds rollouts in the streams: one by its id or any part of it, or those between two sequences.

Reads the bus and returns what the streams hold of each rollout. The figures in the run's folder say when its step was
taken, before the trainer reports it, which it does once a checkpoint has the step. Ids begin with the time at which
they were made, so for a long prefix of an id only messages of about that age are read: a stream is entered from its
end, in growing steps, and left once nothing more can come.
"""

from collections.abc import Sequence
from contextlib import suppress

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import NotFoundError
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, RewardEvent, ScoreEvent, TeacherEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.observe.progress import step_times
from lachesis.services.observe.rollout import RolloutTimeline, decided_seqs
from lachesis.services.run.connect import is_trained

__all__ = ["find_rollout", "first_seq_of_last", "read_rollouts", "seqs_of_steps", "start_at"]

_HEX = frozenset("0123456789abcdef")
_ID_DIGITS = 32
_TIME_DIGITS = 12
_SKEW_NS = 60_000_000_000
"""How far a producer's clock may be ahead of the server's."""
_REACH_MESSAGES = 1024
_NEAR_MESSAGES = 64
"""How near to what is looked for a stream is entered: what lies between is read and decoded."""
_SMALL_SKEW_NS = 100_000_000
_FIRST_LOOK_MESSAGES = 4096
"""Messages in which a whole id is looked for as if all clocks agreed, before the skew is allowed for."""
_MAX_MATCHES = 5
_EVENTS: dict[str, type[ScoreEvent | RewardEvent | TeacherEvent | DeadLetter]] = {
    "score": ScoreEvent,
    "reward": RewardEvent,
    "teacher": TeacherEvent,
    "dead": DeadLetter,
}


async def find_rollout(bus: Bus, config: RunConfig, name: str, *, annotated: bool = False) -> RolloutTimeline:
    """Return the rollout whose id is `name` or has it in it.

    `annotated`: with its scores and rewards, also where its times are known without. Raises `ConfigError` where that
    is no part of an id or fits several, `NotFoundError` where nothing fits.
    """
    name = name.lower()
    if not name or len(name) > _ID_DIGITS or not _HEX.issuperset(name):
        raise ConfigError(f"{name[:80]!r} is no group id: 32 hex digits, or any part of them")
    rollout = await _member(bus, config, name)
    rollout.revision = config.revision
    await _ledger(bus, config, [rollout], until_trained=True)
    dead = rollout.outcome is not None and rollout.outcome.kind == "dead"
    if annotated or rollout.entry is None or dead or not rollout.stamps():
        await _annotations(bus, config, [rollout])
    return rollout


async def read_rollouts(
    bus: Bus, config: RunConfig, envs: Sequence[str], *, first: int, last: int
) -> list[RolloutTimeline]:
    """Return the rollouts of `envs` from sequence `first` of ROLLOUTS to `last`.

    All that is known of them is read.
    """
    found = []
    filters = [subjects.rollout(config.run, env) for env in envs]
    async with bus.read(subjects.ROLLOUTS, filters, start=first, headers_only=True, follow=False) as messages:
        async for message in messages:
            if message.seq > last:
                break
            rollout = _read_member(message)
            if rollout is not None:
                rollout.revision = config.revision
                found.append(rollout)
    if found:
        await _ledger(bus, config, found, until_trained=False)
        await _annotations(bus, config, found)
    return found


async def start_at(bus: Bus, stream: str, filters: Sequence[str], time_ns: int) -> int:
    """Return a sequence at or before the first message stored at `time_ns` or later, not far before it."""
    usage = await bus.usage(stream)
    reach, end = _REACH_MESSAGES, usage.last + 1
    while (start := usage.last - reach + 1) > usage.first and not await _is_older(bus, stream, filters, start, time_ns):
        end, reach = start, 8 * reach
    start = max(start, usage.first)
    while end - start > _NEAR_MESSAGES:  # what lies at `start` is older, what lies at `end` is not
        middle = (start + end) // 2
        if await _is_older(bus, stream, filters, middle, time_ns):
            start = middle
        else:
            end = middle
    return start


async def first_seq_of_last(bus: Bus, stream: str, filters: list[str], count: int) -> int:
    """Return the sequence of the `count`-th last message on `filters`.

    The stream's first if there are fewer.

    Looks back in steps that grow eightfold, so that a long stream is not read from its start for its last messages.
    """
    usage = await bus.usage(stream)
    reach = 8 * count
    while True:
        start = max(usage.first, usage.last - reach + 1)
        seqs: list[int] = []
        async with bus.read(stream, filters, start=start, headers_only=True, follow=False) as messages:
            async for message in messages:
                seqs.append(message.seq)  # noqa: PERF401  # an async comprehension would hide the reader's context
        if len(seqs) >= count:
            return seqs[-count]
        if start == usage.first:
            return start
        reach *= 8


async def seqs_of_steps(bus: Bus, config: RunConfig, first: int, last: int) -> tuple[int, int] | None:
    """Return the lowest and the highest sequence in the batches of steps `first` to `last`.

    They are sequences of ROLLOUTS; None: no such batch is stored. The ledger is entered by halving, so that an old
    step is found as fast as a new one.
    """
    subject = subjects.ledger(config.run, config.training.name)
    usage = await bus.usage(subjects.LEDGER)
    start, end = usage.first, usage.last + 1
    while end - start > _NEAR_MESSAGES:  # before `start` lie none of these batches
        middle = (start + end) // 2
        entry = await _next_entry(bus, subject, middle)
        if entry is not None and entry.next_batch < first:
            start = middle
        else:
            end = middle
    seqs: list[int] = []
    async with bus.read(subjects.LEDGER, [subject], start=start, follow=False) as messages:
        async for message in messages:
            try:
                entry = decode(LedgerEntry, message.data)
            except SchemaError:
                continue
            if entry.batch is not None:
                if entry.batch.number + 1 > last:
                    break
                if entry.batch.number + 1 >= first:
                    seqs += [ref.seq for ref in entry.batch.groups]
    return (min(seqs), max(seqs)) if seqs else None


async def _next_entry(bus: Bus, subject: str, start: int) -> LedgerEntry | None:
    """Return the first entry of the ledger from `start` on that can be read."""
    async with bus.read(subjects.LEDGER, [subject], start=start, follow=False, max_bytes=1 << 16) as messages:
        async for message in messages:
            with suppress(SchemaError):
                return decode(LedgerEntry, message.data)
    return None


async def _is_older(bus: Bus, stream: str, filters: Sequence[str], start: int, time_ns: int) -> bool:
    """Whether what lies at `start` was stored before `time_ns`: the message there, else the next one on `filters`.

    A reader would fetch hundreds of messages for the one that is needed.
    """
    with suppress(NotFoundError):
        return (await bus.get_head(stream, start)).time_ns < time_ns
    async with bus.read(stream, filters, start=start, headers_only=True, follow=False) as messages:
        async for message in messages:
            return message.time_ns < time_ns
    return False


async def _member(bus: Bus, config: RunConfig, name: str) -> RolloutTimeline:
    found: list[RolloutTimeline] = []
    if len(name) >= _TIME_DIGITS:
        made_ns = int(name[:_TIME_DIGITS], 16) * 1_000_000
        filters = [subjects.rollout(config.run)]
        if len(name) == _ID_DIGITS:
            start = await start_at(bus, subjects.ROLLOUTS, filters, made_ns - _SMALL_SKEW_NS)
            found = await _members(bus, config, name, start, start + _FIRST_LOOK_MESSAGES)
        if not found:
            start = await start_at(bus, subjects.ROLLOUTS, filters, made_ns - _SKEW_NS)
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


async def _members(bus: Bus, config: RunConfig, name: str, start: int, end: int | None = None) -> list[RolloutTimeline]:
    """Return the rollouts from `start` on whose ids have `name` in them, no more than are needed to say so.

    None at `end` or beyond.
    """
    found: dict[str, RolloutTimeline] = {}
    filters = [subjects.rollout(config.run)]
    async with bus.read(subjects.ROLLOUTS, filters, start=start, headers_only=True, follow=False) as messages:
        async for message in messages:
            if end is not None and message.seq >= end:
                break
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


async def _ledger(bus: Bus, config: RunConfig, rollouts: Sequence[RolloutTimeline], *, until_trained: bool) -> None:
    """Read what became of rollouts; `until_trained`: until it is known when, else until it is known that."""
    trainer = config.training.name
    ledger = subjects.ledger(config.run, trainer)
    filters = [ledger, subjects.state(config.run, "trainer", subjects.LIVE, trainer)]
    start = await start_at(bus, subjects.LEDGER, filters, min(rollout.stored_ns for rollout in rollouts))
    waiting = {rollout.seq: rollout for rollout in rollouts}
    batched: list[RolloutTimeline] = []
    async with bus.read(subjects.LEDGER, filters, start=start, follow=False) as messages:
        async for message in messages:
            try:
                if message.subject == ledger:
                    entry = decode(LedgerEntry, message.data)
                    for seq in decided_seqs(entry) & waiting.keys():
                        rollout = waiting.pop(seq)
                        rollout.ledger(entry)
                        batched += [] if rollout.ended else [rollout]
                else:
                    report = decode(TrainReport, message.data)
                    for rollout in batched:
                        rollout.report(report)
                    batched = [one for one in batched if not (one.ended or (one.reported and not until_trained))]
            except SchemaError:
                continue  # an unreadable message says nothing about these rollouts
            if not waiting and not batched:
                return
    times = step_times(config.path) if any(not rollout.reported for rollout in batched) else {}
    for rollout in batched:
        if not rollout.reported and rollout.batch is not None and rollout.batch + 1 in times:
            rollout.logged(*times[rollout.batch + 1])
    left = [*waiting.values(), *(rollout for rollout in batched if not rollout.reported)]
    if left and await is_trained(bus, config):
        for rollout in left:
            rollout.is_left_over = True


async def _annotations(bus: Bus, config: RunConfig, rollouts: Sequence[RolloutTimeline]) -> None:
    """Read what was derived of rollouts of which the ledger was read: nothing is once they have an outcome."""
    kinds: tuple[subjects.Kind, ...] = ("score", "reward", "teacher", "dead")
    envs = sorted({rollout.env for rollout in rollouts})
    filters = [subjects.event(kind, config.run, config.revision, env) for env in envs for kind in kinds]
    start = await start_at(bus, subjects.EVENTS, filters, min(rollout.stored_ns for rollout in rollouts))
    settled = [
        rollout.entry.written_ns for rollout in rollouts if rollout.entry is not None and rollout.entry.written_ns
    ]
    end_ns = max(settled) + _SKEW_NS if len(settled) == len(rollouts) else None
    waiting = {rollout.plan.group: rollout for rollout in reversed(rollouts)}  # of one stored twice the first is scored
    async with bus.read(subjects.EVENTS, filters, start=start, follow=False) as messages:
        async for message in messages:
            if not waiting or (end_ns is not None and message.time_ns > end_ns):
                return
            try:
                event = decode(_EVENTS[message.subject.split(".")[1]], message.data)
            except SchemaError:
                continue
            if isinstance(event, DeadLetter):  # which may name a sequence alone
                concerned = list(waiting)
            else:
                concerned = [item.group for item in event.groups if item.group in waiting]
            for group in concerned:
                waiting[group].annotation(event)
                if waiting[group].is_annotated(config.batching):
                    del waiting[group]
