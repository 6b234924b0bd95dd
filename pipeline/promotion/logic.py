"""The protocol of a promotion: a run goes on with another revision from one rollout on. Pure.

There are three steps, each one fenced message. If a process dies between two, the next process to start continues:

1. *requested* `lachesis promote` appends the revision with its settings to the run's list of promotions, undecided.
2. *decided* the batcher finds an undecided promotion in the list and writes an entry into the ledger that says from
   which sequence on it holds (`first`, the sequence after the list). This is the promotion: before the entry there is
   none, after it there is no way back.
3. *published* the batcher writes `first` into the list. A batcher that starts and finds it missing takes it from the
   ledger.

The list is stored in ROLLOUTS, among the rollouts. A scorer reads the list from a server that also holds the rollout,
and so holds every list below it. A server that lags behind is queried again, and a server that wrongly believes that it
leads cannot hide a list. So if a scorer finds nothing undecided, any later promotion begins after its rollout; if it
finds an undecided one, it waits until step 3. Hence every rollout below `first` is scored by the old revision and every
one from there on by the new one, whatever is killed, frozen, cut off or delivered again, and no rollout is scored by
both. Scores and rewards of a promoted revision carry its `first`; the normalizer, when it meets an unknown one, reads
the list, which has it by then.

The normalizer folds each revision's rollouts separately: rewards from `first` on are to the bit those of a replay of
the same rollouts under the same settings, statistics and warm-up included. Batches take rewards of both revisions.
"""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from lachesis.schemas.errors import ConfigError
from lachesis.schemas.promotion import Promotion, PromotionOutcome, Promotions, RewardSettings

__all__ = [
    "active_promotion",
    "decide",
    "giving_up_promotion",
    "publish_decision",
    "request",
    "settings_digest",
    "undecided_promotion",
]


def settings_digest(environments: Mapping[str, RewardSettings], std_floor: float) -> str:
    """Return the digest that names the settings of a revision."""
    content = msgspec.msgpack.encode((environments, std_floor), order="deterministic")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def undecided_promotion(promotions: Sequence[Promotion]) -> Promotion | None:
    """Return the promotion that is requested and not decided."""
    return promotions[-1] if promotions and promotions[-1].first is None else None


def request(run: str, known: Sequence[Promotion], asked: Promotion) -> Promotions | None:
    """Return the list with the new promotion; None if it is there: undecided, or in force.

    Rollouts that wait for unavailable raters may also be given up by a later request of the same promotion.

    Raises `ConfigError` while another one is undecided.
    """
    last = known[-1] if known else None
    if last is not None and (last.revision, last.digest) == (asked.revision, asked.digest):
        if last.give_up or not asked.give_up:
            return None
        return Promotions(run=run, promotions=[*known[:-1], msgspec.structs.replace(last, give_up=True)])
    if last is not None and last.first is None:
        raise ConfigError(
            f"revision {last.revision!r} is being promoted, as {last.by} requested: wait for that, or see that "
            "the batcher runs"
        )
    return Promotions(run=run, promotions=[*known, asked])


def decide(known: Sequence[Promotion], recorded: PromotionOutcome | None, stored_at: int) -> PromotionOutcome | None:
    """Return the ledger's outcome for the undecided promotion.

    Return None if nothing is left to decide.

    `recorded` is what the newest entry says, `stored_at` the sequence of ROLLOUTS at which `known` is stored.
    """
    asked = undecided_promotion(known)
    if asked is None or _is(asked, recorded):
        return None
    return PromotionOutcome(
        revision=asked.revision,
        digest=asked.digest,
        first=stored_at + 1,
        by=asked.by,
        asked_ns=asked.asked_ns,
        std_floor=asked.std_floor,
    )


def publish_decision(run: str, known: Sequence[Promotion], recorded: PromotionOutcome | None) -> Promotions | None:
    """Return the list with the ledger's decision.

    Return None if the list has it already, or nothing is decided.
    """
    asked = undecided_promotion(known)
    if asked is None or recorded is None or not _is(asked, recorded):
        return None
    return Promotions(run=run, promotions=[*known[:-1], msgspec.structs.replace(asked, first=recorded.first)])


def _is(asked: Promotion, recorded: PromotionOutcome | None) -> bool:
    return recorded is not None and (asked.revision, asked.digest, asked.asked_ns) == (
        recorded.revision, recorded.digest, recorded.asked_ns,
    )  # fmt: skip


def active_promotion(promotions: Sequence[Promotion], seq: int) -> Promotion | None:
    """Return the promotion that applies to the rollout at `seq`; None: the run's own configuration."""
    decided = (one for one in promotions if one.first is not None and one.first <= seq)
    return max(decided, key=lambda one: one.first or 0, default=None)


def giving_up_promotion(promotions: Sequence[Promotion], seq: int) -> Promotion | None:
    """Return the promotion that gives up the rollout at `seq` if it cannot be scored; None: it waits."""
    found = (one for one in promotions if one.give_up and one.first is not None and one.first > seq)
    return next(found, None)
