"""Promotions: which revision scores a run's rollouts, and from which rollout on.

They are stored in ROLLOUTS, among the rollouts. One subject a run holds the list of all its promotions, whole in each
message; the newest message counts. The ledger's entries name the newest promotion as well, and they decide
(`pipeline.promotion.logic` has the protocol).
"""

import itertools
from typing import Any, Final

import msgspec

from lachesis.schemas.codec import Event
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import Count, Finite, Seq, check_plain

__all__ = ["PROMOTED_SINCE", "Promotion", "PromotionOutcome", "Promotions", "RewardSettings"]

PROMOTED_SINCE: Final = 2
"""Wire version of what says that a promoted revision judges it: who does not know of promotions takes it for the run's
own."""


class RewardSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one environment's rollouts are scored: settings as in the configuration, and what counts as a success."""

    scoring: dict[str, Any]
    normalization: dict[str, Any]
    reward_config: dict[str, Any]
    advantage: dict[str, Any]
    success_threshold: Finite
    success_rater: str | None = None


class Promotion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A revision that is to take over the run. `digest` names its settings; `by` names the user who requested it,
    `asked_ns` when (Unix time). `first` is the first sequence of ROLLOUTS that it scores, None until that is decided.
    `give_up`: rollouts below it that cannot be scored, because their raters are unavailable, end as dead letters.
    `std_floor` is that of whitening.
    """

    revision: str
    digest: str
    by: str
    asked_ns: Count
    environments: dict[str, RewardSettings]
    std_floor: Finite
    first: Seq | None = None
    give_up: bool = False


class Promotions(Event, frozen=True, kw_only=True):
    """All promotions of a run, in order; only the last may be undecided."""

    run: str
    promotions: list[Promotion]

    def check(self) -> None:
        firsts = [one.first for one in self.promotions]
        if None in firsts[:-1]:
            raise SchemaError("promotions: one that is undecided is followed by another")
        if any(a >= b for a, b in itertools.pairwise(first for first in firsts if first is not None)):
            raise SchemaError("promotions: their first sequences do not rise")
        for one in self.promotions:
            for judging in one.environments.values():
                for name in ("scoring", "normalization", "reward_config", "advantage"):
                    check_plain(name, getattr(judging, name), finite=True)


class PromotionOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A promotion as the ledger records it: `revision`, with the settings that `digest` names, scores rollouts from
    sequence `first` on; `by` requested it at `asked_ns`. Batches are whitened with its `std_floor` from this entry
    on."""

    revision: str
    digest: str
    first: Seq
    by: str
    asked_ns: Count
    std_floor: Finite
