"""Finds the commits and snapshots that a stateful service cannot use, though nothing is lost.

Whoever has a service's key may write on its subjects, where a start takes what it finds for its own: a forged commit,
or one of a fault, would end the service at every start. Each stage is opened here as its service opens it, which
writes nothing. Where that fails for another reason than lost history, the newest commits are left out, as few as it
takes; then the snapshot. What is left out was derived from messages that are there still, so it is derived again.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import anyio.to_thread

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.curriculum.plan import curriculum_environments
from lachesis.pipeline.curriculum.stage import CurriculumWriter, load_items
from lachesis.pipeline.environments.held_out import read_held_out
from lachesis.pipeline.health.stage import AlertWriter
from lachesis.pipeline.retention.recovery_plan import UnusableState
from lachesis.pipeline.rewards.stage import RewardWriter
from lachesis.pipeline.runtime.retention_record import read_left_out
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stateful import StatefulStage
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError, DataError, HistoryLostError, LedgerError
from lachesis.schemas.subjects import EVENTS, LEDGER

__all__ = ["find_unusable"]

_MAX_SNAPSHOTS = 8
"""Snapshots of one stage that are left out at most; before them it starts anew in any case."""
_LOAD_S = 60.0
"""How long an environment may take to load; the state of a curriculum whose environment takes longer is not checked."""

_Make = Callable[[], StatefulStage[Any]]
_Open = Callable[[dict[str, set[int]]], Awaitable[str | None]]
"""Opens a stage without some of its messages; returns what is wrong."""

log = logging.getLogger("lachesis")


async def find_unusable(bus: NatsBus, config: RunConfig) -> UnusableState:
    """Return what the run's stateful stages cannot use of their own messages."""
    left_out: dict[str, set[int]] = {EVENTS: set(), LEDGER: set()}
    problems: list[str] = []
    async for stage, env, make in _stages(bus, config):
        commits = subjects.event(stage.kind, config.run, config.revision, env)
        snapshots = subjects.state(config.run, stage.name, config.revision, env)
        attempt: _Open = partial(_open, make)
        # twice: a service at work may replace a snapshot while it is read
        if await attempt({}) is None or (problem := await attempt({})) is None:
            continue
        skipped = await _find_skips(bus, attempt, commits, snapshots)
        if skipped is None:
            continue  # another reason, which is said where the service starts
        for stream, seqs in skipped.items():
            left_out[stream] |= seqs
        named = ", ".join(f"{min(seqs)} to {max(seqs)} of {stream}" for stream, seqs in sorted(skipped.items()) if seqs)
        problems.append(f"the {stage.name} of {env} cannot use its own messages {named}: {problem}")
    return UnusableState({stream: seqs for stream, seqs in left_out.items() if seqs}, problems)


async def _stages(bus: NatsBus, config: RunConfig) -> AsyncIterator[tuple[type[StatefulStage[Any]], str, _Make]]:
    def service(stage: type[StatefulStage[Any]]) -> Service:
        return Service(bus, stage.name, config.run, config.revision)

    def make(stage: Any, env: str, *more: Any) -> StatefulStage[Any]:
        made: StatefulStage[Any] = stage(service(stage), config, env, *more)
        return made

    for env in config.environments:
        yield AlertWriter, env, partial(make, AlertWriter, env)
        yield RewardWriter, env, partial(make, RewardWriter, env)
    for env in curriculum_environments(config):
        commits = subjects.event("curriculum", config.run, config.revision, env)
        snapshots = subjects.state(config.run, "curriculum", config.revision, env)
        if await bus.last(EVENTS, commits) is None and await bus.last(LEDGER, snapshots) is None:
            continue  # it has no state, and the environment needs no loading
        settings, items = config.environments[env], None
        if not settings.is_foreign:
            record = await read_held_out(service(CurriculumWriter), env)
            try:
                with anyio.fail_after(_LOAD_S):
                    items = await anyio.to_thread.run_sync(
                        load_items, config, env, settings, record, abandon_on_cancel=True
                    )
            except Exception as error:  # noqa: BLE001 - an environment's own code raises anything
                log.warning("what the curriculum of %s can use of its state is not known, since the environment cannot "
                            "be loaded here: %s: %s", env, type(error).__name__, error)  # fmt: skip
                continue
        yield CurriculumWriter, env, partial(make, CurriculumWriter, env, items)


async def _open(make: _Make, left_out: dict[str, set[int]]) -> str | None:
    """Open a stage and return why it cannot be; None where it can, or where something else keeps it from that."""
    writer = make()
    try:
        await writer.open(left_out=left_out, patience_s=0)
    except HistoryLostError:
        return None  # the plan says what is lost
    except ConfigError:
        return None  # a setting was changed, which is said where the service starts
    except (LedgerError, DataError) as error:
        return str(error)
    return None


async def _find_skips(bus: NatsBus, attempt: _Open, commits: str, snapshots: str) -> dict[str, set[int]] | None:
    """Return the fewest newest messages without which the stage opens, None if it does so without none of them."""
    noted = await read_left_out(bus, bus.run)
    seqs = [seq for seq in await _sequences(bus, EVENTS, commits) if seq not in noted.get(EVENTS, ())]
    states = [seq for seq in await _sequences(bus, LEDGER, snapshots) if seq not in noted.get(LEDGER, ())]
    for dropped in range(min(len(states), _MAX_SNAPSHOTS) + 1):
        gone = set(states[len(states) - dropped :])

        async def opens(kept: int, gone: set[int] = gone) -> bool:
            return await attempt({EVENTS: set(seqs[kept:]), LEDGER: gone}) is None

        if not await opens(0):
            continue
        low, high = 0, len(seqs)  # it opens with the first `low`, and not with `high` of them
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if await opens(middle) else (low, middle)
        if dropped and await opens(len(seqs)):
            low = len(seqs)
        return {EVENTS: set(seqs[low:]), LEDGER: gone}
    return None


async def _sequences(bus: NatsBus, stream: str, subject: str) -> list[int]:
    async with bus.read(stream, [subject], headers_only=True, follow=False) as messages:
        return [message.seq async for message in messages]
