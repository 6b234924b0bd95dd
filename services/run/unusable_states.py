"""Finds the messages on a service's own subjects that it cannot use, though nothing is lost.

Any holder of a service's key may write on its subjects, and a start takes what it finds there for its own. A commit,
ledger entry, term or report that is forged, or that a fault wrote, would end the service at every start. This module
opens each as its service does, which writes nothing. If that fails for another reason than lost history, it leaves out
the newest messages, as few as needed, and for a stage then its snapshot. They were derived from messages that are still
there, so they are derived again; if steps were taken on ledger entries that are left out, training goes back.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import anyio.to_thread

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.skipped_messages import read_skipped, skipping
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.curriculum.drawn_environments import curriculum_environments
from lachesis.pipeline.curriculum.stage import CurriculumWriter, load_items
from lachesis.pipeline.environment.held_out import read_held_out
from lachesis.pipeline.errors import HistoryLostError, LedgerError
from lachesis.pipeline.governor.stage import check_term
from lachesis.pipeline.health.stage import AlertWriter
from lachesis.pipeline.ledger.ledger_end import check_whole_ledger
from lachesis.pipeline.normalizer.stage import RewardWriter
from lachesis.pipeline.retention.recovery_plan import UnusableState
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stateful import StatefulStage
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError, DataError, SchemaError
from lachesis.schemas.subjects import EVENTS, LEDGER
from lachesis.services.run.unusable_keys import find_unusable_keys
from lachesis.services.stage_settings import curriculum_settings, health_settings, ledger_settings, normalizer_settings

__all__ = ["find_unusable"]

_MAX_SNAPSHOTS = 8
"""Snapshots of one stage that are left out at most; before them it starts over in any case."""
_LOAD_S = 60.0
"""How long an environment may take to load; the state of a curriculum whose environment takes longer is not checked."""

_Make = Callable[[], StatefulStage[Any]]


class _Owned(NamedTuple):
    """What one service writes and reads again at its start: `name` says what it is, `open` reads it as it does.

    `subject` of `stream` holds it, and `snapshots` of LEDGER hold the state that comes before it (None: nothing does).
    """

    name: str
    stream: str
    subject: str
    snapshots: str | None
    open: Callable[[], Awaitable[object]]


log = logging.getLogger("lachesis")


async def find_unusable(bus: NatsBus, config: RunConfig) -> UnusableState:
    """Return what the run's services cannot use of their own messages and keys."""
    left_out: dict[str, set[int]] = {EVENTS: set(), LEDGER: set()}
    problems: list[str] = []
    async for owned in _everything(bus, config):
        with skipping(left_out):
            # twice: a service at work may replace a snapshot while it is read
            if await _open(owned, {}) is None or (problem := await _open(owned, {})) is None:
                continue
            skipped = await _find_skips(bus, owned)
        if skipped is None:
            continue  # another reason, which is said where the service starts
        for stream, seqs in skipped.items():
            left_out[stream] |= seqs
        named = ", ".join(f"{min(seqs)} to {max(seqs)} of {stream}" for stream, seqs in sorted(skipped.items()) if seqs)
        problems.append(f"{owned.name} cannot use its own messages {named}: {problem}")
    values, more = await find_unusable_keys(bus, config)
    return UnusableState({stream: seqs for stream, seqs in left_out.items() if seqs}, values, [*problems, *more])


async def _everything(bus: NatsBus, config: RunConfig) -> AsyncIterator[_Owned]:
    run, revision, trainer = config.run, config.revision, config.training.name
    term = subjects.state(run, "governor", revision, "0")
    yield _Owned("the governor", LEDGER, term, None, partial(check_term, bus, run, revision))
    report = subjects.state(run, "trainer", subjects.LIVE, trainer)
    read_report = partial(BatchFeed.open, bus, run, trainer, term="")
    yield _Owned("the trainer", LEDGER, report, None, read_report)
    read_ledger = partial(check_whole_ledger, bus, ledger_settings(config))
    yield _Owned("the batcher", LEDGER, subjects.ledger(run, trainer), None, read_ledger)
    async for stage, env, make in _stages(bus, config):
        commits, snapshots = (
            subjects.event(stage.kind, run, revision, env),
            subjects.state(run, stage.name, revision, env),
        )
        yield _Owned(f"the {stage.name} of {env}", EVENTS, commits, snapshots, partial(_open_stage, make))


async def _open_stage(make: _Make) -> None:
    await make().open(patience_s=0)


async def _stages(bus: NatsBus, config: RunConfig) -> AsyncIterator[tuple[type[StatefulStage[Any]], str, _Make]]:
    def service(stage: type[StatefulStage[Any]]) -> Service:
        return Service(bus, stage.name, config.run, config.revision)

    def make(stage: Any, env: str, *more: Any, settings: Any) -> StatefulStage[Any]:
        made: StatefulStage[Any] = stage(service(stage), settings, env, *more)
        return made

    for env in config.environments:
        yield AlertWriter, env, partial(make, AlertWriter, env, settings=health_settings(config))
        yield RewardWriter, env, partial(make, RewardWriter, env, settings=normalizer_settings(config))
    curriculum = curriculum_settings(config)
    for env, one in curriculum_environments(curriculum).items():
        commits = subjects.event("curriculum", config.run, config.revision, env)
        snapshots = subjects.state(config.run, "curriculum", config.revision, env)
        if await bus.last(EVENTS, commits) is None and await bus.last(LEDGER, snapshots) is None:
            continue  # it has no state, and the environment needs no loading
        items = None
        if not one.is_foreign:
            try:
                record = await read_held_out(service(CurriculumWriter), env)
            except SchemaError:
                continue  # the key is named, and the state is looked at once it is put aside
            try:
                with anyio.fail_after(_LOAD_S):
                    items = await anyio.to_thread.run_sync(load_items, one, record, abandon_on_cancel=True)
            except Exception as error:  # noqa: BLE001 - an environment's own code raises anything
                log.warning("what the curriculum of %s can use of its state is not known, since the environment cannot "
                            "be loaded here: %s: %s", env, type(error).__name__, error)  # fmt: skip
                continue
        yield CurriculumWriter, env, partial(make, CurriculumWriter, env, items, settings=curriculum)


async def _open(owned: _Owned, left_out: dict[str, set[int]]) -> str | None:
    """Read what is owned and return why it cannot be; None where it can, or where something else keeps it from that."""
    try:
        with skipping(left_out):
            await owned.open()
    except HistoryLostError:
        return None  # the plan says what is lost
    except ConfigError:
        return None  # a setting was changed, which is said where the service starts
    except (LedgerError, DataError) as error:
        return str(error)
    return None


async def _find_skips(bus: NatsBus, owned: _Owned) -> dict[str, set[int]] | None:
    """Return the fewest newest messages without which it opens, None if it opens without none, too."""
    stream, noted = owned.stream, await read_skipped(bus)
    seqs = [seq for seq in await _sequences(bus, stream, owned.subject) if seq not in noted.get(stream, ())]
    states = [] if owned.snapshots is None else await _sequences(bus, LEDGER, owned.snapshots)
    states = [seq for seq in states if seq not in noted.get(LEDGER, ())]
    for dropped in range(min(len(states), _MAX_SNAPSHOTS) + 1):
        gone = set(states[len(states) - dropped :])

        async def opens(kept: int, gone: set[int] = gone) -> bool:
            return (
                await _open(owned, {LEDGER: gone, stream: {*seqs[kept:], *(gone if stream == LEDGER else ())}}) is None
            )

        if not await opens(0):
            continue
        low, high = 0, len(seqs)  # it opens with the first `low`, and not with `high` of them
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if await opens(middle) else (low, middle)
        if dropped and await opens(len(seqs)):
            low = len(seqs)
        return {LEDGER: gone, stream: {*seqs[low:], *(gone if stream == LEDGER else ())}}
    return None


async def _sequences(bus: NatsBus, stream: str, subject: str) -> list[int]:
    async with bus.read(stream, [subject], headers_only=True, follow=False) as messages:
        return [message.seq async for message in messages]
