"""Claims places of the epoch order in the run's bucket.

Every change is a compare-and-set, so that any process may die at any line.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import anyio

from lachesis.pipeline.environment.epoch import Claimer, EpochOrder
from lachesis.pipeline.errors import FencedError
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stored_values import decode_value
from lachesis.schemas import keys
from lachesis.schemas.codec import encode
from lachesis.schemas.control import EpochClaim, EpochRecord

__all__ = ["EpochClaims"]

T = TypeVar("T")


class EpochClaims:
    """The claims of one process in one environment. Every change is stored before it returns."""

    def __init__(self, service: Service, env: str, order: EpochOrder, claimer: Claimer, *, ttl_s: float) -> None:
        self.order = order
        self._service = service
        self._key = keys.epoch(env)
        self._env = env
        self._claimer = claimer
        self._ttl_ns = int(ttl_s * 1e9)
        self._at_work: set[tuple[int, int]] = set()
        self._lock = anyio.Lock()  # so that the process does not compete with itself
        self._left_out = 0

    async def claim(self) -> EpochClaim:
        """Claim the next place. Raises `InfrastructureError` when the service drains before it is stored."""

        def change(record: EpochRecord) -> tuple[EpochRecord, EpochClaim]:
            return self.order.claim(
                record, self._claimer, at_work=self._at_work, now_ns=time.time_ns(), ttl_ns=self._ttl_ns
            )

        async with self._lock:
            claim = await self._change("claim an item of the epoch", change)
            self._at_work.add(claim.key)
        self._service.vitals.metrics[f"environment/{self._env}/epoch"] = claim.epoch + claim.place / len(self.order)
        return claim

    async def take_over(self, claim: EpochClaim) -> EpochClaim | None:
        """Claim the place of a group that another life began; None: its group is stored."""
        async with self._lock:
            taken = await self._change(
                "take over an item of the epoch",
                lambda record: self.order.take_over(record, claim, self._claimer, time.time_ns()),
            )
            if taken is not None:
                self._at_work.add(taken.key)
        return taken

    async def settle(self, claim: EpochClaim) -> None:
        """End a claim whose group is stored."""
        async with self._lock:
            await self._change("settle an item of the epoch", lambda record: (self.order.settle(record, claim), None))
            self._at_work.discard(claim.key)

    async def give_back(self, claim: EpochClaim, *, failed: bool) -> None:
        """Give a claim back, to be claimed again; `failed`: through its item's own fault."""
        async with self._lock:
            left_out = await self._change(
                "give an item of the epoch back", lambda record: self.order.give_back(record, claim, failed=failed)
            )
            self._at_work.discard(claim.key)
        if left_out:
            self._left_out += 1
            self._service.vitals.metrics[f"environment/{self._env}/left_out"] = self._left_out
            self._service.set_problem(
                f"{self._env} epoch",
                f"{self._env}: epoch {claim.epoch} goes on without item {self.order.item(claim)}, which failed "
                f"{claim.failures + 1} times ({self._left_out} items so far)",
            )

    async def _change(self, what: str, change: Callable[[EpochRecord], tuple[EpochRecord, T]]) -> T:
        return await self._service.retrying(what)(self._try_change, change)

    async def _try_change(self, change: Callable[[EpochRecord], tuple[EpochRecord, T]]) -> T:
        while True:
            entry = await self._service.bus.value(self._key)
            record = decode_value(EpochRecord, entry, self._key) or self.order.first()
            changed, result = change(record)
            if changed == record and entry is not None:
                return result
            try:
                await self._service.bus.put(self._key, encode(changed), revision=0 if entry is None else entry.revision)
            except FencedError:
                continue  # another process was quicker
            return result
