"""Defines the ledger: which groups were batched, in which order, and the outcome of every other one.

The ledger is the source of truth.

One writer (the batcher) appends entries to `rl.ledger.<run>.<trainer>`. Each names the hash of the one before, so that
a consumer that kept a position can distinguish the same history from another. An entry is also the writer's whole
state: a restart needs the last entry alone.
"""

import hashlib
import itertools
from typing import Annotated, Literal, Self

import msgspec

from lachesis.schemas.annotations import Stamp
from lachesis.schemas.codec import MAX_ERROR_CHARS, UNREADABLE, Event, encode
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.promotion import PROMOTED_SINCE, PromotionOutcome
from lachesis.schemas.sequences import UNTRAINABLE_SINCE
from lachesis.schemas.values import Count, Finite, Seq

__all__ = [
    "GENESIS",
    "MAX_DROP_REASON_CHARS",
    "Batch",
    "EnvMismatch",
    "GroupDrops",
    "GroupRef",
    "LedgerEntry",
    "Mismatch",
    "Numerics",
    "Outcome",
    "OutcomeKind",
    "ProducerMark",
    "StepTimes",
    "TrainReport",
    "VoidBatch",
]

GENESIS = "0" * 64
"""What the first entry names as the hash before it."""

MAX_DROP_REASON_CHARS = 200
"""Characters kept of the reason why a trainer dropped groups."""

OutcomeKind = Literal[
    "batched",
    "stale",
    "zero_variance",
    "unscorable",
    "untrainable",
    "quarantined",
    "dead",
    "duplicate",
    "oversized",
    "lease_expired",
]


class GroupRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One group of a batch: where its payload lies and what to train it with.

    `sequences` is what it weighs in a batch: 1 for each sample, however many sequences that one is trained on.
    `advantages` has one entry per sample (None: the sample is left out); `teacher` is a sequence of the TEACHER stream;
    `policy_step` is the oldest step of the policy that made it, `newest_step` the newest, None if that is the same.
    `score` is the group's mean score before normalization. `turn_advantages` as in `GroupReward`: where there are some,
    they are trained with instead.
    """

    group: str
    seq: Seq
    env: str
    sequences: Count
    tokens: Count
    policy_step: Count
    advantages: list[Finite | None]
    teacher: Seq | None = None
    score: Finite | None = None
    turn_advantages: list[list[Finite] | None] = []
    newest_step: Count | None = None

    @property
    def last_step(self) -> int:
        """The newest step of the policy that made it."""
        return self.policy_step if self.newest_step is None else self.newest_step


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest: batch `number` counts from 0 without gaps; `complete` is false when it is smaller than requested."""

    number: Count
    groups: list[GroupRef]
    sequences: Count
    tokens: Count
    complete: bool = True


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of the rollout at `seq` of ROLLOUTS. `group` is None where the message could not be read."""

    seq: Seq
    group: str | None
    kind: OutcomeKind
    sequences: Count = 0
    reason: str | None = None


class ProducerMark(msgspec.Struct, frozen=True, array_like=True):
    """Counters seen of one life (`epoch`) of a producer, as ranges: `seen` holds start and end of each, [start, end),
    ascending.
    """

    epoch: Count
    seen: list[Annotated[int, msgspec.Meta(ge=0)]]


class LedgerEntry(Event, frozen=True, kw_only=True, dict=True):
    """One step of the ledger.

    Every rollout of the run up to `watermark` (a sequence of ROLLOUTS) has an outcome; above it, bit i of `resolved`
    says so of sequence watermark + 1 + i. `events_cursor` is the sequence of EVENTS from which a restarted writer reads
    again. `outcomes` holds those not in `batch`; `producers` the counters seen, by `<producer>@<epoch>`. `promoted` is
    the newest promotion, in the entry that decides it and in all after it; unset before. `stale` gives the length of
    the groups that `outcomes` calls stale: by environment the mean tokens of a sequence of each; unset if there is
    none. `term`, `written_ns` and `stamps` are outside the digest.
    """

    run: str
    trainer: str
    index: Count
    previous: str
    watermark: Count
    resolved: bytes
    events_cursor: Count
    batch: Batch | None = None
    outcomes: list[Outcome] = []
    producers: dict[str, ProducerMark] = {}
    totals: dict[str, Count] = {}
    next_batch: Count = 0
    promoted: PromotionOutcome | msgspec.UnsetType = msgspec.UNSET
    stale: dict[str, list[Count]] | msgspec.UnsetType = msgspec.UNSET
    term: str = ""
    written_ns: Count = 0
    stamps: dict[str, list[Stamp]] = {}

    @property
    def needs(self) -> int:
        untrainable = any(outcome.kind == "untrainable" for outcome in self.outcomes)
        return max(PROMOTED_SINCE if self.promoted else 1, UNTRAINABLE_SINCE if untrainable else 1)

    def digest(self) -> str:
        """Return the SHA-256 (hex) that the next entry names as `previous`.

        Of an entry that was read it covers what is stored, fields that this build does not know included, so that a
        reader agrees with a newer writer on the chain.
        """
        return self.__dict__.get(_DIGEST) or _digest(encode(self))

    def from_wire(self, data: bytes | memoryview) -> Self:
        try:
            self.__dict__[_DIGEST] = _digest(data)
        except UNREADABLE as error:  # the name of a field that is passed over otherwise
            raise SchemaError(f"LedgerEntry: {str(error)[:MAX_ERROR_CHARS]}") from error
        return self

    def check(self) -> None:
        if self.batch is not None:
            if self.batch.sequences != sum(ref.sequences for ref in self.batch.groups):
                raise SchemaError("batch: its sequences do not add up")
            if self.batch.number + 1 != self.next_batch:
                raise SchemaError(f"batch: number {self.batch.number} where next_batch is {self.next_batch}")
        for key, mark in self.producers.items():
            rising = all(before < after for before, after in itertools.pairwise(mark.seen))
            if len(mark.seen) % 2 or not rising or not key.endswith(f"@{mark.epoch}"):
                raise SchemaError(f"producers: {key[:80]!r} has counters that are no ranges, or another epoch")


_DIGEST = "_digest"
_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_OUTSIDE = {
    name: msgspec.Raw(msgspec.msgpack.encode(empty))
    for name, empty in (("term", ""), ("written_ns", 0), ("stamps", {}))
}


def _digest(data: bytes | memoryview) -> str:
    """Hash a stored entry with the fields outside the digest emptied and all others byte for byte as they are."""
    return hashlib.sha256(msgspec.msgpack.encode({**_fields.decode(data), **_OUTSIDE})).hexdigest()


class VoidBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch that could not be trained, and why."""

    batch: Count
    reason: str


class GroupDrops(msgspec.Struct, frozen=True, array_like=True):
    """Groups of a batch that the trainer could not use, by their sequences in ROLLOUTS, and why. The others of the
    batch were trained, with the advantages that the batch gives them.
    """

    batch: Count
    seqs: list[Seq]
    reason: str


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """When the optimizer step on a batch began and ended, Unix ns."""

    batch: Count
    start_ns: Count
    end_ns: Count


class EnvMismatch(msgspec.Struct, frozen=True, array_like=True):
    """How the trainer's logprobs differ from the rollouts' over some trained tokens of a step; None: not a number.

    With w = p_train / p_rollout: `k1` = -mean(ln w), `k3` = mean(w - 1 - ln w), `ratio` = mean(w), `ess` = the
    effective sample size (sum w)^2 / sum w^2 as a share of the tokens.
    """

    k1: Finite | None
    k3: Finite | None
    ratio: Finite | None
    ess: Finite | None


class Mismatch(msgspec.Struct, frozen=True, array_like=True):
    """How the trainer's logprobs differ from the rollouts', over all trained tokens of a step (see `EnvMismatch`).

    `step_kl` is KL(before || after) of the step itself, nats a token, and `entropy` that of the policy before it, nats
    a token; None: not measured. `envs` has the same of the tokens of each environment alone; None: not measured. An
    environment that is missing there had no token in the step, or gave way to worse ones in a report that is full.
    """

    k1: Finite | None
    k3: Finite | None
    ratio: Finite | None
    ess: Finite | None
    step_kl: Finite | None = None
    entropy: Finite | None = None
    envs: dict[str, EnvMismatch] | None = None

    def of_env(self, env: str | None) -> EnvMismatch | None:
        """Return the part of an environment, that of all where none was measured; None: it had no token."""
        if self.envs is None or env is None:
            return EnvMismatch(self.k1, self.k3, self.ratio, self.ess)
        return self.envs.get(env)


class Numerics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Numerics of an optimizer step in addition to weights and batch: versions, machine, settings.

    `learner` holds the settings of the step as JSON, `shuffle_seed` the seed that advantages were shuffled with (None:
    they were not), `inputs` what the model was given in addition to text tokens (`training.inputs`). `torch` is its
    version; `processor` and `instructions` name the machine, `threads` how many were used by each of `ranks` processes.
    `microbatches` are pairs of a step's number and the most tokens that a micro-batch had from that step on, where that
    is not what the settings say: so many did not fit into memory. `packed`: rows were computed in one, without padding.
    """

    torch: str
    processor: str
    instructions: str
    threads: Count
    learner: str
    shuffle_seed: int | None = None
    inputs: tuple[str, ...] = ()
    ranks: Count = 1
    microbatches: tuple[tuple[Count, Count], ...] = ()
    packed: bool = False


class TrainReport(Event, frozen=True, kw_only=True):
    """What a trainer has made durable: written to its state subject after its checkpoint is on disk, fenced.

    `ledger_index` and `chain` are the index and digest of the last ledger entry whose batch is in the weights; -1 and
    `GENESIS` before the first. `steps` are those that this life of the trainer took since its last report, and
    `mismatches` what those of them found that were no void. `numerics` says how they were computed. `voids` are batches
    of which nothing was trained, `drops` the groups that were left out of the others.
    """

    run: str
    trainer: str
    lineage: str
    term: str
    step: Count
    ledger_index: Annotated[int, msgspec.Meta(ge=-1)]
    chain: str
    next_batch: Count
    policy_version: str
    checkpoint: str
    voids: list[VoidBatch] = []
    written_ns: Count = 0
    steps: list[StepTimes] = []
    mismatches: list[Mismatch] = []
    numerics: Numerics | None = None
    drops: list[GroupDrops] = []
