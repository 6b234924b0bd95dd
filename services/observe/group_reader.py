"""Reads a run's groups for people: newest first, or as their outcome is decided.

Reads the streams alone, a stretch of ROLLOUTS at a time, so that memory does not grow with the history.
"""

import heapq
import math
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from typing import NamedTuple

import anyio

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.runtime.rollouts import read_rollout
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.rollout import RolloutGroup
from lachesis.services.observe.find import find_rollout, read_rollouts, seqs_of_steps
from lachesis.services.observe.groups import (
    GroupFilter,
    GroupOrder,
    GroupRow,
    GroupView,
    NumberRange,
    group_row,
    group_view,
    has_text,
    with_prompt,
)
from lachesis.services.observe.rollout import decided_seqs

__all__ = ["GroupPage", "follow_groups", "newest_groups", "read_group", "read_group_page"]

_FIRST_MESSAGES = 128
_MAX_MESSAGES = 2048
"""Messages of ROLLOUTS that are read at a time: few at first, more where few of them are wanted."""


_LAST_STEP = (1 << 53) - 1


class GroupPage(NamedTuple):
    """Some of the groups that are wanted, the newest first. `before`: where the next page begins, None: at no more."""

    rows: list[GroupRow]
    before: int | None


class _Stretch(NamedTuple):
    rows: list[GroupRow]
    low: int
    done: int
    total: int


async def read_group_page(
    bus: Bus,
    config: RunConfig,
    wanted: GroupFilter,
    *,
    limit: int,
    before: int | None = None,
    seconds: float | None = None,
    order: GroupOrder | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> GroupPage:
    """Return up to `limit` of the groups that are wanted, the newest first, with their prompts.

    Arguments are as in `newest_groups`. No stretch of the history is begun after `seconds`: there may be fewer then,
    though older ones are wanted. With an `order`, the first of all that are read in that time.
    """
    until_s = None if seconds is None else anyio.current_time() + seconds
    page = await _read_page(
        bus, config, wanted, limit=limit, before=before, until_s=until_s, order=order, progress=progress
    )
    return page._replace(rows=await _with_prompts(bus, page.rows))


async def _read_page(
    bus: Bus,
    config: RunConfig,
    wanted: GroupFilter,
    *,
    limit: int,
    before: int | None,
    until_s: float | None,
    order: GroupOrder | None,
    progress: Callable[[int, int], None],
) -> GroupPage:
    found: list[GroupRow] = []
    async with aclosing(_stretches(bus, config, wanted, before)) as stretches:
        if order is not None:
            return await _first_in_order(stretches, order, limit=limit, until_s=until_s, progress=progress)
        async for stretch in stretches:
            room = limit - len(found)
            found += stretch.rows[:room]
            progress(stretch.done, stretch.total)
            left_over, ended = len(stretch.rows) > room, stretch.done == stretch.total
            if len(found) == limit:
                return GroupPage(found, found[-1].seq if left_over or not ended else None)
            if until_s is not None and anyio.current_time() > until_s and not ended:
                return GroupPage(found, stretch.low)
    return GroupPage(found, None)


async def _first_in_order(
    stretches: AsyncGenerator[_Stretch],
    order: GroupOrder,
    *,
    limit: int,
    until_s: float | None,
    progress: Callable[[int, int], None],
) -> GroupPage:
    """Return the first `limit` groups in an order; of equal ones the newest come first. Holds no more than these."""
    best: list[tuple[float, int, GroupRow]] = []
    left = None
    async for stretch in stretches:
        for row in stretch.rows:
            if (key := order.key(row)) is not None:
                heapq.heappush(best, (key, row.seq, row))
                if len(best) > limit:
                    heapq.heappop(best)
        progress(stretch.done, stretch.total)
        if until_s is not None and anyio.current_time() > until_s and stretch.done < stretch.total:
            left = stretch.low
            break
    return GroupPage([row for _, _, row in sorted(best, reverse=True)], left)


async def newest_groups(
    bus: Bus,
    config: RunConfig,
    wanted: GroupFilter,
    *,
    before: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AsyncGenerator[GroupRow]:
    """Yield the groups that are wanted, the newest first.

    With `before` only those below that sequence of ROLLOUTS. `progress` is called with how many sequences are read, of
    how many.
    """
    async with aclosing(_stretches(bus, config, wanted, before)) as stretches:
        async for stretch in stretches:
            for row in stretch.rows:
                yield row
            progress(stretch.done, stretch.total)


async def _stretches(bus: Bus, config: RunConfig, wanted: GroupFilter, before: int | None) -> AsyncGenerator[_Stretch]:
    """Yield the history backward, a stretch of ROLLOUTS at a time."""
    usage = await bus.usage(subjects.ROLLOUTS)
    first, last = usage.first, usage.last if before is None else min(usage.last, before - 1)
    if wanted.step is not None:
        within = await seqs_of_steps(bus, config, *_steps_in(wanted.step))
        if within is None:
            return
        first, last = max(first, within[0]), min(last, within[1])
    newest = high = last
    reach = _FIRST_MESSAGES
    while high >= first:
        low = max(first, high - reach + 1)
        rows = await _wanted_rows(bus, config, wanted, low, high)
        yield _Stretch(rows[::-1], low, newest - low + 1, newest - first + 1)
        high, reach = low - 1, min(2 * reach, _MAX_MESSAGES)


def _steps_in(steps: NumberRange) -> tuple[int, int]:
    """Return the first and the last optimizer step in a range of numbers."""
    low, high = steps.low, steps.high
    first = 1 if low is None or low < 1 else math.ceil(low) if low <= _LAST_STEP else _LAST_STEP
    last = _LAST_STEP if high is None or high > _LAST_STEP else math.floor(high) if high >= 1 else 0
    return first, last


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
                rows = await _wanted_rows(bus, config, wanted, min(decided), max(decided))
                for row in await _with_prompts(bus, [row for row in rows if row.seq in decided]):
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
    holding: dict[int, GroupRow] = {}
    async with aclosing(_read_groups(bus, rows)) as groups:
        async for row, group in groups:
            if has_text(group, wanted.text):
                holding[row.seq] = with_prompt(row, group)
    return [holding[row.seq] for row in rows if row.seq in holding]


async def _with_prompts(bus: Bus, rows: list[GroupRow]) -> list[GroupRow]:
    """Return the rows with what their rollouts say; one that cannot be read stays as it is."""
    read: dict[int, GroupRow] = {}
    with suppress(NotFoundError):  # trimmed since the rows were read
        async with aclosing(_read_groups(bus, [row for row in rows if row.turns is None])) as groups:
            async for row, group in groups:
                read[row.seq] = with_prompt(row, group)
    return [read.get(row.seq, row) for row in rows]


async def _read_groups(bus: Bus, rows: Iterable[GroupRow]) -> AsyncGenerator[tuple[GroupRow, RolloutGroup]]:
    """Yield each row with its rollout, the oldest first. Raises `NotFoundError` where one is gone."""
    by_seq = {row.seq: row for row in rows}
    async with aclosing(bus.fetch(subjects.ROLLOUTS, sorted(by_seq))) as messages:
        async for message in messages:
            try:
                group = read_rollout(message).group
            except SchemaError:
                continue  # a stage has written a dead letter of it
            yield by_seq[message.seq], group
