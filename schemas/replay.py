"""Defines revisions of re-scored history, and their commits.

Both are stored in REPLAY; the live run never sees them.

A revision is defined once, by the first message on its own subject; every later start must mean the same. Its commits
hold scores and rewards of some groups of one environment together, with the state of the fold and the position in
ROLLOUTS reached: one fenced message, so a crash leaves all of it or nothing.
"""

from typing import Any, Final, Literal

import msgspec

from lachesis.schemas.annotations import Commit, GroupReward, GroupScore, check_rewards, check_scores
from lachesis.schemas.codec import Event
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ids import is_group_id
from lachesis.schemas.values import Count, Finite, Seq, check_plain

__all__ = ["EnsembleInfo", "OfflineTrainerRecord", "RescoreEvent", "RevisionRecord", "Selection", "UnscoredGroup"]

TEACHER_SINCE: Final = 2
"""The wire version whose readers know that offline trainers may use a teacher."""


class Selection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which rollouts of the run; what is None selects nothing out. All bounds are included.

    `envs` by name. `first_seq` and `last_seq` are sequences of ROLLOUTS, `since_ns` and `until_ns` Unix times of
    storing, `min_step` and `max_step` the oldest policy step that a group was made with. `groups` is the digest of a
    list of group ids, sorted. With `follow` it has no end: what is stored later belongs to it too.
    """

    envs: list[str]
    first_seq: Seq | None = None
    last_seq: Seq | None = None
    since_ns: Count | None = None
    until_ns: Count | None = None
    min_step: Count | None = None
    max_step: Count | None = None
    groups: str | None = None
    follow: bool = False


class EnsembleInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What judges one environment: digest of the ensemble, version by rater, and what counts as a success."""

    ensemble: str
    raters: dict[str, str]
    success_threshold: Finite
    success_rater: str | None = None


class RevisionRecord(Event, frozen=True, kw_only=True):
    """The definition of a revision: all that its scores and rewards depend on.

    `first` and `last` are the sequences of ROLLOUTS that the selection came to when it was first made, `groups` how
    many by environment; of a selection that has no end `last` is None and nothing is counted. `normalization` holds its
    settings, `normalizations` those of environments that have their own, `advantage` those of each environment.
    """

    run: str
    revision: str
    selection: Selection
    first: Seq
    last: Seq | None
    groups: dict[str, Count]
    judges: dict[str, EnsembleInfo]
    normalization: dict[str, Any]
    advantage: dict[str, Any]
    created_ns: Count
    normalizations: dict[str, Any] = {}

    def check(self) -> None:
        check_plain("normalization", self.normalization, finite=True)
        check_plain("normalizations", self.normalizations, finite=True)
        check_plain("advantage", self.advantage, finite=True)


class UnscoredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that cannot be scored, or whose scores cannot be normalized, and why."""

    group: str
    seq: Seq
    reason: str


class RescoreEvent(Event, frozen=True, kw_only=True):
    """Scores and rewards of some groups under a revision, in the order of ROLLOUTS, and the commit of the fold's state.

    `digest` names every score and reward of this environment up to here, whatever messages they came in; stamps are
    not in it. `ensemble`, `raters` and `advantage` are as in scores and rewards of the live revision.
    """

    run: str
    env: str
    revision: str
    ensemble: str
    raters: dict[str, str]
    advantage: str
    commit: Commit
    digest: str
    scores: list[GroupScore]
    rewards: list[GroupReward]
    unscored: list[UnscoredGroup] = []

    def check(self) -> None:
        check_scores(self.scores)
        check_rewards(self.rewards)
        for item in self.unscored:
            if not is_group_id(item.group):
                raise SchemaError(f"unscored: {item.group[:40]!r} is no group")


class OfflineTrainerRecord(Event, frozen=True, kw_only=True):
    """What an offline trainer trains on: the definition of its ledger, stored before the ledger's first entry.

    `digest` names the scores and rewards of the revision; `model` what training begins with, and `start` the optimizer
    step of the run that its weights are of. Rollouts outside `min_step` and `max_step` (their oldest policy step) or
    staler than `max_staleness` are not trained on. `batch_size`, `token_budget`, `mix` and `teacher` are the settings
    of batch formation, `std_floor` that of whitening.

    What came of it: `entries` of the ledger, the last of which has the digest `chain`, with `batches` of `groups`;
    `manifest` names all batches in order, whatever the trainer is called.
    """

    run: str
    trainer: str
    revision: str
    digest: str
    model: str
    start: Count
    max_staleness: Count | None
    min_step: Count | None
    max_step: Count | None
    batch_size: Count
    token_budget: Count | None
    mix: dict[str, Finite]
    teacher: Literal["off", "optional", "required"] = "off"
    std_floor: Finite
    entries: Count
    batches: Count
    groups: Count
    chain: str
    manifest: str
    created_ns: Count

    @property
    def needs(self) -> int:
        return 1 if self.teacher == "off" else TEACHER_SINCE
