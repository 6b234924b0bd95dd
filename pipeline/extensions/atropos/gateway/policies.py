"""Remembers the run's policy versions, for rollouts from producers that do not name a version."""

import logging
from bisect import bisect_right

import msgspec

from lachesis.pipeline.bus.api import Bus
from lachesis.schemas import keys
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import SchemaError

__all__ = ["PolicyVersions"]

log = logging.getLogger("lachesis")

_MAX_POLICY_VERSIONS = 4096


class PolicyVersions:
    """Follows the run's policy record; run `follow` in a task beside the requests."""

    def __init__(self) -> None:
        self._records: list[PolicyRecord] = []  # by the time they were written

    async def follow(self, bus: Bus) -> None:
        """Record every policy version from now on, first the newest existing one. Runs until cancelled."""
        async with bus.watch(keys.POLICY) as entries:
            async for entry in entries:
                try:
                    self.record_version(decode(PolicyRecord, entry.value))
                except SchemaError as error:
                    log.warning("a policy record cannot be read: %s", error)

    def record_version(self, record: PolicyRecord) -> None:
        """Record a version; of older ones nothing is kept that only the newest is needed for, as its probe."""
        *older, newest = sorted([*self._records, record], key=lambda other: other.written_ns)
        older = [msgspec.structs.replace(one, earlier=None, token_probe=None) for one in older]
        self._records = [*older, newest][-_MAX_POLICY_VERSIONS:]

    @property
    def newest_version(self) -> PolicyRecord | None:
        return self._records[-1] if self._records else None

    def version_at(self, time_ns: int) -> PolicyRecord | None:
        """Return the newest version at Unix time `time_ns`, or the oldest known one if all came later."""
        after = bisect_right(self._records, time_ns, key=lambda record: record.written_ns)
        return self._records[max(0, after - 1)] if self._records else None
