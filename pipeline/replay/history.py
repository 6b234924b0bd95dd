"""Reading the history that a replay selects: once by its headers, to know what there is, and then what is wanted of it.

Guarantees that what is handed out is exactly what was found, in order: a rollout that is gone meanwhile is an error.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NamedTuple

from lachesis.pipeline.bus.api import Bus, Stored
from lachesis.pipeline.replay.logic.selection import selects
from lachesis.schemas import subjects
from lachesis.schemas.errors import NotFoundError, SchemaError
from lachesis.schemas.plan import PLAN_HEADER, Plan
from lachesis.schemas.replay import Selection

__all__ = ["Found", "Take", "feed", "find"]

_DENSE = 8
"""From one wanted rollout in so many sequences on, all that lies between is read too: that is faster than to ask for
each."""


class Found(NamedTuple):
    """A selected rollout."""

    seq: int
    group: str


Take = Callable[[Found, Stored], Awaitable[bool]]
"""Takes the next rollout, and says whether it wants another."""


async def find(
    bus: Bus, run: str, selection: Selection, groups: Collection[str] | None, *, env: str, first: int, last: int
) -> list[Found]:
    """Return the selected rollouts of `env` from sequence `first` to `last`, in order.

    One whose header cannot be read is in no selection, as it is in no window of the live run.
    """
    found: list[Found] = []
    if first > last:
        return found
    subject = subjects.rollout(run, env)
    async with bus.read(subjects.ROLLOUTS, [subject], start=first, headers_only=True, follow=False) as messages:
        async for message in messages:
            if message.seq > last:
                break
            try:
                plan = Plan.unpack(message.headers.get(PLAN_HEADER))
            except SchemaError:
                continue
            if selects(selection, groups, plan, message.seq, message.time_ns):
                found.append(Found(message.seq, plan.group))
    return found


async def feed(bus: Bus, run: str, env: str, wanted: Sequence[Found], take: Take) -> None:
    """Give each of `wanted` with its message to `take`, in order, until it says that it is enough.

    Raises `NotFoundError` naming the first that is gone.
    """
    if not wanted:
        return
    first, last = wanted[0].seq, wanted[-1].seq
    if last - first >= _DENSE * len(wanted):
        messages = bus.fetch(subjects.ROLLOUTS, [found.seq for found in wanted])
        for found in wanted:
            if not await take(found, await anext(messages)):
                return
        return
    remaining = iter(wanted)
    found = next(remaining)
    subject = subjects.rollout(run, env)
    async with bus.read(subjects.ROLLOUTS, [subject], start=first, follow=False) as reader:
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
