"""The list of a run's promotions.

It is changed by compare-and-set, and read by every service that scores rollouts.
"""

import logging

import anyio

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.commit_ids import commit_id
from lachesis.pipeline.bus.last_event import decode_owned, read_last_event
from lachesis.pipeline.bus.skipped_messages import read_skipped
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.promotion.logic import (
    active_promotion,
    giving_up_promotion,
    undecided_promotion,
)
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import VersionError
from lachesis.schemas.promotion import Promotion, Promotions
from lachesis.schemas.subjects import ROLLOUTS

__all__ = ["ActivePromotion", "read_promotions", "write_promotions"]

log = logging.getLogger("lachesis")

_POLL_S = 0.05


async def read_promotions(bus: Bus, run: str, revision: str) -> tuple[list[Promotion], int]:
    """Return the promotions, and the last sequence on their subject.

    The next `write_promotions` must expect that sequence.
    """
    subject = subjects.promotion(run, revision)
    found, _, last = await read_last_event(bus, ROLLOUTS, subject, Promotions, lambda one: one.run == run)
    return (found.promotions if found else []), last


async def write_promotions(bus: Bus, promotions: Promotions, revision: str, *, expected: int) -> int:
    """Store the list and return its sequence. Raises `FencedError` if another process wrote meanwhile."""
    promotions.check()
    name = subjects.promotion(promotions.run, revision)
    last = promotions.promotions[-1]
    msg_id = commit_id(f"{name}.{expected}.{last.revision}.{last.asked_ns}.{last.first}")
    return await bus.commit(name, encode(promotions), expected=expected, msg_id=msg_id)


class ActivePromotion:
    """Finds a rollout's promotion in the list of a server that also holds the rollout.

    One read serves every caller that came before it began, and every rollout that the server holds. So a backlog needs
    few reads, and a caller waits at most for the read under way and the next one.

    The consumer that delivers the rollouts cannot deliver the lists as well: the replicas of a scorer share it, so one
    of them alone would get each list, while the others may hold rollouts behind it.
    """

    def __init__(self, bus: Bus, run: str, revision: str) -> None:
        self._bus, self._run = bus, run
        self._subject = subjects.promotion(run, revision)
        self._promotions: list[Promotion] = []
        self._lists = 0  # how many were stored when the newest was read
        self._newest = 0  # its sequence
        self._stored_to = 0  # by the requests: a delivered rollout is stored, and so are all below
        self._known_to = -1
        self._looking = anyio.Lock()

    async def promotions_known_at(self, seq: int) -> list[Promotion]:
        """Return all promotions, read from a server that has everything up to `seq`, which is stored.

        Raises `InfrastructureError` while no such server answers.
        """
        self._stored_to = max(self._stored_to, seq)
        if seq > self._known_to:
            async with self._looking:
                if seq > self._known_to:  # a read meanwhile began before this rollout was known to be there
                    await self._poll()
        return self._promotions

    async def promotion_at(self, seq: int) -> Promotion | None:
        """Return the promotion of the rollout at `seq`, which is stored; None: the run's configuration.

        Raises `InfrastructureError` while that is not known.
        """
        if undecided_promotion(await self.promotions_known_at(seq)) is not None:
            await anyio.sleep(_POLL_S)
            await self._look_again()
        return active_promotion(self._promotions, seq)

    async def giving_up_promotion(self, seq: int) -> Promotion | None:
        """Return the promotion that gives up the rollout at `seq`, by the current list; None: it waits.

        For a rollout with raters that are unavailable. Raises `InfrastructureError` as `promotion_at`.
        """
        await self._look_again()
        return giving_up_promotion(self._promotions, seq)

    async def _look_again(self) -> None:
        async with self._looking:
            await self._poll()
        asked = undecided_promotion(self._promotions)
        if asked is not None:
            raise InfrastructureError(
                f"revision {asked.revision} is being promoted, and the batcher has not said from where on"
            )

    async def _poll(self) -> None:
        needed = self._stored_to
        extent = await self._bus.extent(ROLLOUTS, self._subject)
        if extent.last < needed:
            raise InfrastructureError(
                f"{ROLLOUTS} ends at {extent.last} on a server that lags behind: {needed} is stored"
            )
        if extent.messages != self._lists:
            await self._adopt(extent.messages)
        self._known_to = max(self._known_to, extent.last)

    async def _adopt(self, lists: int) -> None:
        """Take over the newest list of promotions; at least `lists` of them are stored."""
        found, at, newest = 0, 0, Promotions(run=self._run, promotions=[])
        async with self._bus.read(ROLLOUTS, [self._subject], follow=False) as messages:
            async for message in messages:
                found, at = found + 1, message.seq
                newest = await self._list_in(message) or newest
        if found < lists:
            newest_list = await self._bus.last(ROLLOUTS, self._subject)  # if that is damaged, this says so
            if newest_list is not None and newest_list.seq == at:
                found = lists  # an older one is damaged, which the newest replaces
        if found < lists or at < self._newest:
            raise InfrastructureError(f"{self._subject}: {found} lists on a server that lags behind")
        decided = [one for one in newest.promotions if one.first is not None]
        for one in decided[sum(one.first is not None for one in self._promotions) :]:
            log.info(
                "revision %s, promoted by %s, scores rollouts from sequence %d on", one.revision, one.by, one.first
            )
        self._promotions, self._lists, self._newest = newest.promotions, found, at

    async def _list_in(self, message: StoredMessage) -> Promotions | None:
        try:
            left_out = await read_skipped(self._bus)
            return await decode_owned(
                self._bus, Promotions, message, lambda one: one.run == self._run, left_out=left_out
            )
        except VersionError as error:  # rollouts wait for the upgrade
            raise InfrastructureError(str(error)) from error
