"""The governor: a state machine that grants leases so that no more is generated than can be used.

What goes in: rollouts as they are stored, ledger entries, the trainer's step, stream sizes, and requests for leases.
What comes out: replies. The invariant this file alone guarantees: sequences granted, stored without an outcome, or in a
batch not yet trained never exceed (max_staleness + 1) x batch_size, so nothing older than max_staleness steps can pile
up. Leased groups may always publish, a late one too, so only what comes without a lease can pass the bound. Time is an
argument, seconds on any clock that does not jump; it is never read here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lachesis.pipeline.batching.config import BatchingConfig
from lachesis.pipeline.batching.marks import Resolved
from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.flow.config import FlowConfig
from lachesis.schemas.control import LeaseReply, LeaseRequest
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.plan import Plan
from lachesis.schemas.subjects import EVENTS, ROLLOUTS, TEACHER

__all__ = ["Governor", "Lease"]

_BYTES_PER_TOKEN = 9
"""What a token weighs in a stored group, used to tell tokens from leased bytes."""


@dataclass(slots=True)
class Lease:
    """The right to generate one group of at most `sequences` and `bytes`, until `expires_s` unless renewed."""

    id: str
    producer: str
    env: str
    sequences: int
    bytes: int
    expires_s: float


@dataclass(frozen=True, slots=True)
class _Stored:
    env: str
    sequences: int
    tokens: int


class Governor:
    """`term` names this life of the governor in lease ids; nothing is granted before `grants_from_s`."""

    def __init__(self, config: FlowConfig, batching: BatchingConfig, *, term: str, grants_from_s: float) -> None:
        self.config = config
        self.capacity = (batching.max_staleness + 1) * batching.batch_size
        self._batch_size = batching.batch_size
        self._term = term
        self._grants_from_s = grants_from_s
        self._stored: dict[int, _Stored] = {}
        self._resolved = Resolved()
        self._batches: dict[int, int] = {}
        self._next_batch = 0
        self._trained = 0
        self._leases: dict[str, Lease] = {}
        self._asked_s: dict[str, float] = {}
        self._usage: Mapping[str, StreamUsage] = {}
        self._granted = 0
        self.refused = 0
        self.expired = 0

    # facts

    def member(self, seq: int, env: str, plan: Plan) -> None:
        """A rollout is stored at `seq`: it counts from now on, and its lease no longer does."""
        if plan.lease is not None:
            self._leases.pop(plan.lease, None)
        if seq not in self._resolved:
            self._stored[seq] = _Stored(env, plan.sequences, plan.tokens)

    def entry(self, entry: LedgerEntry) -> None:
        """The ledger has grown: what has an outcome now counts no longer, unless it waits in a batch to be trained."""
        self._resolved = Resolved(entry.watermark, entry.resolved)
        self._stored = {seq: held for seq, held in self._stored.items() if seq not in self._resolved}
        self._next_batch = entry.next_batch
        if entry.batch is not None:
            self._batches[entry.batch.number] = entry.batch.sequences

    def trained(self, step: int) -> None:
        """The trainer's weights hold every batch below `step`. A trainer that starts again may step back."""
        self._trained = step
        self._batches = {number: size for number, size in self._batches.items() if number >= step}

    def usage(self, streams: Mapping[str, StreamUsage]) -> None:
        """What the streams hold now."""
        self._usage = streams

    def expire(self, now_s: float) -> None:
        """Drop leases whose time is over: their producers are gone, or will be counted when they publish."""
        for lease in [lease for lease in self._leases.values() if lease.expires_s <= now_s]:
            del self._leases[lease.id]
            self.expired += 1

    # requests

    def ask(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        """Answer a request. A refusal says why and when to ask again."""
        self.expire(now_s)
        if request.op == "acquire":
            return self._acquire(request, now_s)
        lease = self._leases.get(request.lease or "")
        if request.op == "release":
            if lease is not None:
                del self._leases[lease.id]
            return LeaseReply(granted=True, lease=request.lease)
        if lease is None:
            return LeaseReply(granted=False, lease=request.lease, reason="there is no such lease; it ended or was used")
        lease.expires_s = now_s + self.config.lease_s
        return LeaseReply(granted=True, lease=lease.id, expires_s=self.config.lease_s)

    def _acquire(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        self._asked_s[request.env] = now_s
        reason = self._refusal(request, now_s)
        if reason is not None:
            self.refused += 1
            wait = max(self.config.retry_s, self._grants_from_s - now_s)
            return LeaseReply(granted=False, retry_s=wait, reason=reason)
        self._granted += 1
        lease = Lease(
            id=f"{self._term}-{self._granted}",
            producer=request.producer,
            env=request.env,
            sequences=request.sequences,
            bytes=request.bytes,
            expires_s=now_s + self.config.lease_s,
        )
        self._leases[lease.id] = lease
        return LeaseReply(granted=True, lease=lease.id, expires_s=self.config.lease_s)

    def _refusal(self, request: LeaseRequest, now_s: float) -> str | None:
        """Return why nothing can be granted, None if it can."""
        if now_s < self._grants_from_s:
            return f"the governor started again and waits {self._grants_from_s - now_s:.1f} s for leases it cannot know"
        if request.sequences > self.capacity:
            return (
                f"a group of {request.sequences} sequences can never be admitted: (max_staleness + 1) x batch_size is "
                f"{self.capacity}; make groups smaller, or batches larger"
            )
        if self.outstanding + request.sequences > self.capacity:
            return f"{self.outstanding} of {self.capacity} sequences are outstanding; the trainer has to catch up"
        held, reserve = self._held(request.env), self._reserve(now_s)
        below = held == 0 or held + request.sequences <= reserve
        kept = 0 if below else self._kept_for_others(request.env, reserve, now_s)
        if self.outstanding + request.sequences + kept > self.capacity:
            return f"what is left of {self.capacity} sequences is reserved for environments that have less"
        return self._full_stream(request)

    def _full_stream(self, request: LeaseRequest) -> str | None:
        needs = self._reserved_bytes(request.sequences, request.bytes)
        for lease in self._leases.values():
            for stream, size in self._reserved_bytes(lease.sequences, lease.bytes).items():
                needs[stream] += size
        for stored in self._stored.values():  # their annotations are still to come
            annotations = self._reserved_bytes(stored.sequences, stored.tokens * _BYTES_PER_TOKEN)
            needs[EVENTS] += annotations[EVENTS]
            needs[TEACHER] += annotations[TEACHER]
        for stream, need in needs.items():
            usage = self._usage.get(stream)
            if usage is not None and usage.bytes + need > self.config.close_at * usage.max_bytes:
                return (
                    f"stream {stream} holds {usage.bytes} bytes and {need} more are reserved, of "
                    f"{self.config.close_at:.0%} of {usage.max_bytes}; trim history or raise its budget"
                )
        return None

    def _reserved_bytes(self, sequences: int, size: int) -> dict[str, int]:
        config = self.config
        return {
            ROLLOUTS: size,
            EVENTS: config.event_bytes_per_group + sequences * config.event_bytes_per_sequence,
            TEACHER: config.teacher_bytes_per_token * (size // _BYTES_PER_TOKEN),
        }

    # figures

    @property
    def leased(self) -> int:
        """Sequences granted and not stored yet."""
        return sum(lease.sequences for lease in self._leases.values())

    @property
    def accepted(self) -> int:
        """Sequences stored that have no outcome yet."""
        return sum(stored.sequences for stored in self._stored.values())

    @property
    def untrained(self) -> int:
        """Sequences in batches that are not in the weights yet; a batch never seen here counts in full."""
        return sum(self._batches.get(number, self._batch_size) for number in range(self._trained, self._next_batch))

    @property
    def outstanding(self) -> int:
        """What the bound is on."""
        return self.leased + self.accepted + self.untrained

    def metrics(self) -> dict[str, float]:
        """Return figures for monitoring under `flow/`."""
        return {
            "flow/capacity": self.capacity,
            "flow/outstanding": self.outstanding,
            "flow/leased": self.leased,
            "flow/accepted": self.accepted,
            "flow/untrained": self.untrained,
            "flow/granted": self._granted,
            "flow/refused": self.refused,
            "flow/expired": self.expired,
        }

    def _held(self, env: str) -> int:
        stored = sum(held.sequences for held in self._stored.values() if held.env == env)
        return stored + sum(lease.sequences for lease in self._leases.values() if lease.env == env)

    def _active(self, now_s: float) -> list[str]:
        """Environments that asked within the last lease period."""
        return [env for env, asked_s in self._asked_s.items() if now_s - asked_s <= self.config.lease_s]

    def _reserve(self, now_s: float) -> float:
        return self.config.reserved_share * self.capacity / max(1, len(self._active(now_s)))

    def _kept_for_others(self, env: str, reserve: float, now_s: float) -> float:
        return sum(max(0.0, reserve - self._held(other)) for other in self._active(now_s) if other != env)
