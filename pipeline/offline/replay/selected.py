"""Reads the history that a replay selects: first the headers, then the selected rollouts.

Guarantees that it returns exactly the rollouts that were selected, in order: one that is gone meanwhile is an error.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.routing import BROKEN_HEADER
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.offline.replay.logic.rollout_filter import selects
from lachesis.schemas import subjects
from lachesis.schemas.errors import DataError, SchemaError
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.replay import Selection

__all__ = ["SelectedRollout", "Take", "feed", "fetched", "find", "follow", "selected"]

log = logging.getLogger("lachesis")

_SEQUENCES_PER_WANTED = 8
"""From one wanted rollout in so many sequences on, all that lies between is read too: that is faster than to ask for
each."""


class SelectedRollout(NamedTuple):
    """A selected rollout."""

    env: str
    seq: int
    group: str


Take = Callable[[SelectedRollout, StoredMessage], Awaitable[bool]]
"""Takes the next rollout, and says whether it wants another."""


async def selected(
    bus: Bus,
    run: str,
    selection: Selection,
    groups: Collection[str] | None,
    *,
    envs: Sequence[str],
    first: int,
    last: int,
) -> AsyncGenerator[SelectedRollout]:
    """Yield the selected rollouts of `envs` from sequence `first` to `last`, in order, by their headers.

    One whose header cannot be read is in no selection, as it is in no window of the live run; in the end it is said
    how many these are. It holds a reader open: a caller that may stop early closes it (`contextlib.aclosing`).
    """
    if first > last:
        return
    filters = [subjects.rollout(run, env) for env in envs]
    unreadable, newest = 0, 0
    async with bus.read(subjects.ROLLOUTS, filters, start=first, headers_only=True, follow=False) as messages:
        async for message in messages:
            if message.seq > last:
                break
            plan = _plan(message)
            if plan is None:
                unreadable, newest = unreadable + 1, message.seq
            elif selects(selection, groups, plan, message.seq, message.time_ns):
                yield _rollout_of(message, plan)
    if unreadable:
        names = ", ".join(envs)
        log.warning("rollouts of %s passed over, because their planning header cannot be read: %d, the newest at "
                    "sequence %d of %s", names, unreadable, newest, subjects.ROLLOUTS)  # fmt: skip


async def find(
    bus: Bus, run: str, selection: Selection, groups: Collection[str] | None, *, env: str, first: int, last: int
) -> list[SelectedRollout]:
    """Return the selected rollouts of `env` from sequence `first` to `last`, in order."""
    return [one async for one in selected(bus, run, selection, groups, envs=[env], first=first, last=last)]


def _plan(message: StoredMessage) -> Plan | None:
    """Return what a rollout's header says; None if it cannot be read."""
    try:
        return Plan.unpack(message.headers.get(PLAN_HEADER))
    except SchemaError:
        return None


def _rollout_of(message: StoredMessage, plan: Plan) -> SelectedRollout:
    return SelectedRollout(message.subject.rsplit(".", 1)[-1], message.seq, plan.group)


async def follow(bus: Bus, run: str, selection: Selection, cursors: Mapping[str, int], take: Take) -> None:
    """Pass the selected rollouts to `take` in the order of ROLLOUTS, as they are stored.

    Each environment starts at its cursor. It ends when `take` says so. Rollouts that were trimmed before they were read
    are skipped.
    """
    filters = [subjects.rollout(run, env) for env in cursors]
    async with bus.read(subjects.ROLLOUTS, filters, start=min(cursors.values())) as messages:
        async for message in messages:
            plan = _plan(message)
            if plan is None or not selects(selection, None, plan, message.seq, message.time_ns):
                continue
            found = _rollout_of(message, plan)
            if message.seq >= cursors[found.env] and not await take(found, message):
                return


async def fetched(bus: Bus, run: str, wanted: Sequence[SelectedRollout]) -> AsyncGenerator[StoredMessage]:
    """Yield the message of each of `wanted`, at least one, in order.

    One that cannot be put together comes with the reason, as it comes from a reader. Raises `NotFoundError`.
    """
    done = 0
    envs = {found.env for found in wanted}
    subject = subjects.rollout(run, *(envs if len(envs) == 1 else ())) if _is_dense(wanted) else None
    while done < len(wanted):
        try:
            seqs = [found.seq for found in wanted[done:]]
            async with aclosing(bus.fetch(subjects.ROLLOUTS, seqs, subject)) as messages:
                async for message in messages:
                    done += 1
                    yield message
        except DataError as error:
            found = wanted[done]
            done += 1
            headers = {BROKEN_HEADER: str(error)}
            yield StoredMessage(subjects.ROLLOUTS, subjects.rollout(run, found.env), found.seq, b"", 0, headers)


async def feed(bus: Bus, run: str, env: str, wanted: Sequence[SelectedRollout], take: Take) -> None:
    """Pass each of `wanted` with its message to `take`, in order, until it says stop.

    They are rollouts of `env`; `*` is any environment.

    Raises `NotFoundError` naming the first that is gone.
    """
    if not wanted:
        return
    if not _is_dense(wanted):
        async with aclosing(fetched(bus, run, wanted)) as messages:
            for found in wanted:
                if not await take(found, await anext(messages)):
                    return
        return
    remaining = iter(wanted)
    found = next(remaining)
    subject = subjects.rollout(run, env)
    async with bus.read(subjects.ROLLOUTS, [subject], start=found.seq, follow=False) as reader:
        async for message in reader:
            if message.seq < found.seq:
                continue
            if message.seq > found.seq:
                break
            following = next(remaining, None)
            if not await take(found, message) or following is None:
                return
            found = following
    raise NotFoundError(f"group {found.group} is gone from sequence {found.seq} of {subjects.ROLLOUTS} of run {run}")


def _is_dense(wanted: Sequence[SelectedRollout]) -> bool:
    return wanted[-1].seq - wanted[0].seq < _SEQUENCES_PER_WANTED * len(wanted)
