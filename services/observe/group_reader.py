"""Reads a run's groups for people: newest first, or as their outcome is decided.

Reads the streams alone, a stretch of ROLLOUTS at a time, so that memory does not grow with the history.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.runtime.rollouts import read_rollout
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import NotFoundError, SchemaError
from lachesis.schemas.ledger import LedgerEntry
from lachesis.services.observe.find import find_rollout, read_rollouts
from lachesis.services.observe.groups import GroupFilter, GroupRow, GroupView, group_row, group_view, has_text
from lachesis.services.observe.rollout import decided_seqs

__all__ = ["follow_groups", "newest_groups", "read_group"]

_FIRST_MESSAGES = 128
_MAX_MESSAGES = 2048
"""Messages of ROLLOUTS that are read at a time: few at first, more where few of them are wanted."""


async def newest_groups(
    bus: Bus,
    config: RunConfig,
    wanted: GroupFilter,
    *,
    before: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AsyncGenerator[GroupRow]:
    """Yield the groups that are wanted, the newest first.

    With `before` those that lie below that sequence of ROLLOUTS. `progress` is told how many sequences are read, of how
    many.
    """
    usage = await bus.usage(subjects.ROLLOUTS)
    newest = high = usage.last if before is None else min(usage.last, before - 1)
    reach = _FIRST_MESSAGES
    while high >= usage.first:
        low = max(usage.first, high - reach + 1)
        for row in reversed(await _wanted_rows(bus, config, wanted, low, high)):
            yield row
        progress(newest - low + 1, newest - usage.first + 1)
        high, reach = low - 1, min(2 * reach, _MAX_MESSAGES)


async def follow_groups(bus: Bus, config: RunConfig, wanted: GroupFilter) -> AsyncGenerator[GroupRow]:
    """Yield the groups that are wanted as it is decided what becomes of each; never end."""
    ledger = subjects.ledger(config.run, config.training.name)
    _, _, last = await read_last_event(bus, subjects.LEDGER, ledger, LedgerEntry, lambda entry: entry.run == config.run)
    async with bus.read(subjects.LEDGER, [ledger], start=last + 1) as messages:
        async for message in messages:
            try:
                entry = decode(LedgerEntry, message.data)
            except SchemaError:
                continue  # what cannot be read decides of nothing
            if decided := decided_seqs(entry):
                for row in await _wanted_rows(bus, config, wanted, min(decided), max(decided)):
                    if row.seq in decided:
                        yield row


async def read_group(bus: Bus, config: RunConfig, name: str) -> GroupView:
    """Return the group whose id is `name` or has it in it. Raises as `find_rollout`, and `SchemaError`."""
    rollout = await find_rollout(bus, config, name, annotated=True)
    async with aclosing(bus.fetch(subjects.ROLLOUTS, [rollout.seq])) as messages:
        async for message in messages:
            return group_view(rollout, read_rollout(message).group, config.batching)
    raise NotFoundError(f"group {rollout.plan.group} is not stored any more")


async def _wanted_rows(bus: Bus, config: RunConfig, wanted: GroupFilter, low: int, high: int) -> list[GroupRow]:
    rollouts = await read_rollouts(bus, config, wanted.envs or ["*"], first=low, last=high)
    rows = [row for rollout in rollouts if wanted.takes(row := group_row(rollout, config.batching))]
    if wanted.text is None or not rows:
        return rows
    holding = set()
    async with aclosing(bus.fetch(subjects.ROLLOUTS, [row.seq for row in rows])) as messages:
        async for message in messages:
            try:
                if has_text(read_rollout(message).group, wanted.text):
                    holding.add(message.seq)
            except SchemaError:
                continue  # a stage has written a dead letter of it
    return [row for row in rows if row.seq in holding]
