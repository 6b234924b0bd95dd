"""Keeps the epoch order: every item once an epoch, even if processes are killed. Pure.

An epoch is a permutation of the items, keyed by the run's seed and the epoch's number: the same in every process. The
record, which `epoch_claims` stores, holds the next place of the epoch, and the claimed places with groups that are not
known to be stored. A claim ends when its group is stored. A place that was given back, or left by a process that died,
is claimed again before any new place. Claims are bounded by what the environment's processes generate at a time, and
the record with them.
"""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.errors import SettingsChangedError
from lachesis.pipeline.tasks.item_keys import Keys, mixed
from lachesis.schemas.control import EpochClaim, EpochRecord

__all__ = ["MAX_FAILURES_PER_CLAIM", "Claimer", "EpochOrder"]

MAX_FAILURES_PER_CLAIM = 3
"""Failures of an item's own code or size in one epoch, after which the epoch goes on without it."""


@dataclass(frozen=True, slots=True)
class Claimer:
    """The claiming process: `holder` is a name that it keeps after a restart, `life` distinguishes its lives."""

    holder: str
    life: int


class EpochOrder:
    """The order of one environment's items: `drawable` bool [N] marks those that are drawn at all.

    The order depends on `keys` uint64 [N], so that another order of the pool does not change it.
    """

    def __init__(self, seed: int, drawable: NDArray[np.bool_], keys: Keys) -> None:
        self._seed = seed
        items = np.flatnonzero(drawable)
        self._items = items[np.argsort(keys[items], kind="stable")]
        self._keys = keys[self._items]
        self._orders: dict[int, NDArray[np.int64]] = {}
        digest = mixed(self._keys + np.uint64(seed & 0xFFFFFFFF))
        self.digest = f"{len(self._items)}-{int(np.bitwise_xor.reduce(digest)):016x}"

    def __len__(self) -> int:
        return len(self._items)

    def item(self, claim: EpochClaim) -> int:
        """Return the item at the claim's place of its epoch."""
        if claim.epoch not in self._orders:
            while len(self._orders) > 1:  # the order of the epoch before may still be needed
                del self._orders[min(self._orders)]
            key = np.uint64((self._seed * 0x10001 + claim.epoch + 1) % (1 << 64))
            keys = mixed(self._keys ^ mixed(np.array([key]))[0])
            self._orders[claim.epoch] = self._items[np.argsort(keys, kind="stable")]
        return int(self._orders[claim.epoch][claim.place])

    def first(self) -> EpochRecord:
        """Return the record before anything was drawn."""
        return EpochRecord(order=self.digest)

    def claim(
        self, record: EpochRecord, claimer: Claimer, *, at_work: Collection[tuple[int, int]], now_ns: int, ttl_ns: int
    ) -> tuple[EpochRecord, EpochClaim]:
        """Claim a place: one that was given back or left behind if there is one, else the next.

        `at_work` holds (epoch, place) of what this process works on. Claims of other holders count as left behind
        after `ttl_ns`. Raises SettingsChangedError if the record is of other items or another seed.
        """
        if record.order != self.digest:
            raise SettingsChangedError(
                f"the epoch's order is over {record.order.partition('-')[0]} items, and there are {len(self)} now, or "
                "other ones, or the seed is another. Set the environment's params and files, evaluate.held_out and "
                "seed back, or start a new run"
            )
        for i, claim in enumerate(record.claims):
            own = claim.holder == claimer.holder and claim.life <= claimer.life
            left = not claim.holder or own or now_ns - claim.since_ns > ttl_ns
            if left and claim.key not in at_work:
                taken = msgspec.structs.replace(claim, holder=claimer.holder, life=claimer.life, since_ns=now_ns)
                return record.replace(claims=[*record.claims[:i], *record.claims[i + 1 :], taken]), taken
        epoch, place = (record.epoch, record.next) if record.next < len(self) else (record.epoch + 1, 0)
        new = EpochClaim(epoch=epoch, place=place, holder=claimer.holder, life=claimer.life, since_ns=now_ns)
        return record.replace(epoch=epoch, next=place + 1, claims=[*record.claims, new]), new

    def take_over(
        self, record: EpochRecord, claim: EpochClaim, claimer: Claimer, now_ns: int
    ) -> tuple[EpochRecord, EpochClaim | None]:
        """Make the claim of a place this process's, though another one holds it. None: its group is stored."""
        for i, one in enumerate(record.claims):
            if one.key == claim.key:
                taken = msgspec.structs.replace(one, holder=claimer.holder, life=claimer.life, since_ns=now_ns)
                return record.replace(claims=[*record.claims[:i], *record.claims[i + 1 :], taken]), taken
        return record, None

    def settle(self, record: EpochRecord, claim: EpochClaim) -> EpochRecord:
        """End the claims of a place once its group is stored, whichever process holds them."""
        return record.replace(claims=[one for one in record.claims if one.key != claim.key])

    def give_back(self, record: EpochRecord, claim: EpochClaim, *, failed: bool) -> tuple[EpochRecord, bool]:
        """Give a claim back, to be claimed again; `failed`: through its item's own fault.

        Return whether the item is left out of this epoch, since it failed too often. A claim that another process took
        over stays with it.
        """
        failures = claim.failures + failed
        left_out = failures >= MAX_FAILURES_PER_CLAIM
        back = [] if left_out else [msgspec.structs.replace(claim, holder="", life=0, failures=failures)]
        kept = [
            one for one in record.claims if (one.key, one.holder, one.life) != (claim.key, claim.holder, claim.life)
        ]
        if len(kept) == len(record.claims):
            return record, False
        return record.replace(claims=[*kept, *back]), left_out
