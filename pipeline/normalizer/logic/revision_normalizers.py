"""The normalizers of one environment after promotions: one for each revision, side by side. Pure.

Each folds the rollouts that its revision scores, from its `first` on, and knows nothing of the others: so results from
a promotion on are those of a replay from there. The older one goes on until all its rollouts are folded; neither waits
for the other. State and deltas of a run without a promotion are those of its one normalizer.

An environment's scores name the promotion that made them. A promotion that is not known yet must be made known with
`promote` before its scores are fed: its rollouts were given to the previous normalizer, and move to the new one.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.logic.normalizer import Columns, EnvNormalizer, NormalizerStep, ReadyGroup
from lachesis.pipeline.normalizer.logic.reward import RewardRule
from lachesis.pipeline.normalizer.logic.snapshot import NormalizationSnapshot
from lachesis.schemas.errors import DataError
from lachesis.schemas.values import Seq, convert_plain

__all__ = ["NormalizerChange", "RevisionNormalizer", "RevisionNormalizers", "RewardTerms", "promotions_in"]

_OWN_NORMALIZER = 1


class RewardTerms(NamedTuple):
    """How a revision makes rewards of an environment's scores."""

    normalization: NormalizationConfig
    rule: RewardRule


class RevisionNormalizer:
    """One revision's normalizer. `promoted` is the sequence of ROLLOUTS it begins with; None: the run's own."""

    def __init__(self, env: str, terms: RewardTerms, promoted: int | None) -> None:
        self.promoted = promoted
        self.first = promoted or _OWN_NORMALIZER
        self.rule = terms.rule
        self.normalizer = EnvNormalizer(env, terms.normalization, terms.rule.finish, first=self.first)


class NormalizerChange(NamedTuple):
    """The result of one step of one revision's normalizer; `delta` must be committed with it."""

    of: RevisionNormalizer
    ready: list[ReadyGroup]
    delta: bytes


class _RevisionState(msgspec.Struct, frozen=True):
    """A delta of a promoted revision."""

    promoted: Seq
    delta: dict[str, Any]


class _SavedNormalizers(msgspec.Struct, frozen=True):
    promoted: Seq | None
    state: dict[str, Any]


class _NormalizersState(msgspec.Struct, frozen=True):
    generations: list[_SavedNormalizers]


def promotions_in(state: Any, deltas: Sequence[Any]) -> list[int]:
    """Return the first sequences of the promotions that committed state and deltas are of.

    Raises `SchemaError`.
    """
    saved: list[_SavedNormalizers] = []
    if isinstance(state, dict) and "generations" in state:
        saved = convert_plain("normalizer state", _NormalizersState, state).generations
    tagged = [delta["promoted"] for delta in deltas if isinstance(delta, dict) and "promoted" in delta]
    return [*(one.promoted for one in saved if one.promoted), *convert_plain("normalizer deltas", list[Seq], tagged)]


class RevisionNormalizers:
    """See the module's docstring. `env` is the environment, `own` has the reward terms of the run's configuration."""

    def __init__(self, env: str, own: RewardTerms) -> None:
        self._env = env
        self._live = [RevisionNormalizer(env, own, None)]
        self._ended: set[int] = set()  # by first sequence: promotions whose later rollouts were taken
        self._read = 0

    # -- which there are

    def is_known(self, promoted: int | None) -> bool:
        """Whether scores of that promotion can be fed, or are of one that is done."""
        return promoted is None or promoted <= (self._live[-1].promoted or 0)

    def promote(self, first: int, terms: RewardTerms) -> None:
        """Make a promotion known. In rising order; a repeated one changes nothing."""
        if self.is_known(first):
            return
        self._live.append(RevisionNormalizer(self._env, terms, first))
        self._end_older()

    def _end_older(self) -> None:
        """Give each what the one before was fed of it, once all below was read (what is folded was)."""
        for older, newer in itertools.pairwise(self._live):
            read = self._read >= newer.first or older.normalizer.watermark >= newer.first
            if not read or older.first in self._ended:
                continue
            self._ended.add(older.first)
            for one in older.normalizer.end(newer.first):
                if one.member:
                    newer.normalizer.member(one.seq, one.group)
                if one.dead:
                    newer.normalizer.resolve(one.group, one.seq, None, source=one.source)

    def _of(self, seq: int) -> RevisionNormalizer | None:
        """Return whose rollout is at `seq`; None: of one that is done."""
        return next((one for one in reversed(self._live) if one.first <= seq), None)

    def rule_of(self, promoted: int | None) -> RewardRule:
        """Return the rule by which scores of a known promotion are folded."""
        return next((one.rule for one in self._live if one.promoted == promoted), self._live[-1].rule)

    # -- inputs, as `EnvNormalizer`'s

    def member(self, seq: int, group: str) -> None:
        """Record that ROLLOUTS sequence `seq` holds `group`. Raises `DataError`."""
        self._read = max(self._read, seq)
        self._end_older()
        mine = self._of(seq)
        if mine is None or any(
            older.normalizer.has_folded(seq, group)
            for older, newer in itertools.pairwise(self._live)
            if newer.first <= mine.first
        ):
            return  # an older one has folded it: it ended without scores before its revision was known here
        mine.normalizer.member(seq, group)

    def resolve(
        self, group: str, seq: int, values: Columns | None, *, source: int, promoted: int | None = None
    ) -> None:
        """Record a group's scores by a promotion that is known, or that it ended without.

        Raises `DataError` as `EnvNormalizer`, and where another revision scored a group that waits: it would for ever.
        """
        mine = self._of(seq)
        if mine is None:
            return
        if values is not None and mine.promoted != promoted:
            if mine.normalizer.is_unresolved(seq, group):
                due, other = (
                    f"revision promoted at {one}" if one else "run's own revision" for one in (mine.promoted, promoted)
                )
                raise DataError(
                    f"group {group}: scored by the {other}, where the {due} counts; `lachesis dead requeue` has it "
                    "scored again"
                )
            mine.normalizer.unknown += 1
            return
        mine.normalizer.resolve(group, seq, values, source=source)

    @property
    def ahead(self) -> int:
        """Number of outcomes of sequences that are not known yet."""
        return sum(one.normalizer.ahead for one in self._live)

    def drop_ahead(self, source: int) -> list[tuple[str, int]]:
        """Drop those of them that came up to `source` of EVENTS; return group and source of each."""
        return [dropped for one in self._live for dropped in one.normalizer.drop_ahead(source)]

    # -- output

    def step(self) -> NormalizerChange | None:
        """Hand out what became ready in one normalizer; call again until there is nothing."""
        for one in self._live:
            step: NormalizerStep = one.normalizer.step()
            if step.delta is not None:
                delta = step.delta if one.promoted is None else {"promoted": one.promoted, "delta": step.delta}
                return NormalizerChange(one, step.ready, msgspec.msgpack.encode(delta))
        return None

    def forget_done(self) -> None:
        """Drop the normalizers that are folded completely, after the commit that says so."""
        while len(self._live) > 1 and self._done(0):
            self._live.pop(0)

    def _folded(self, place: int) -> bool:
        """Whether all rollouts of a revision are folded."""
        return self._live[place].normalizer.watermark >= self._live[place + 1].first

    def _done(self, place: int) -> bool:
        """Whether all is folded, and the next one has its rollouts and has folded as far."""
        older, newer = self._live[place], self._live[place + 1]
        given = older.first in self._ended
        return given and self._folded(place) and newer.normalizer.watermark >= older.normalizer.watermark

    @property
    def watermark(self) -> int:
        """Lowest ROLLOUTS sequence that is not folded."""
        newest = len(self._live) - 1
        return min(one.normalizer.watermark for i, one in enumerate(self._live) if i == newest or not self._folded(i))

    def unresolved(self, last: int) -> list[tuple[int, str]]:
        """Return sequence and group of every member up to sequence `last` that has no outcome yet."""
        return sorted(found for one in self._live for found in one.normalizer.unresolved(last))

    def oldest_source(self) -> int | None:
        """Return the lowest `source` of an outcome that is not folded; None if there is none."""
        held = [source for one in self._live if (source := one.normalizer.oldest_source()) is not None]
        return min(held, default=None)

    def snapshot(self) -> NormalizationSnapshot:
        """Return the newest revision's snapshot after its newest closed window."""
        return self._live[-1].normalizer.snapshot()

    def metrics(self) -> dict[str, float]:
        """Return the figures of the newest."""
        return self._live[-1].normalizer.metrics()

    # -- durable state

    @property
    def has_promotions(self) -> bool:
        """Whether there is a promotion."""
        return self._live[-1].promoted is not None

    def state(self) -> bytes:
        """Return the folded state, without that of revisions that are done."""
        self.forget_done()
        if not self.has_promotions:
            return msgspec.msgpack.encode(self._live[0].normalizer.state_dict())
        saved = [_SavedNormalizers(one.promoted, one.normalizer.state_dict()) for one in self._live]
        return msgspec.msgpack.encode(_NormalizersState(saved))

    def restore(self, state: Any, deltas: Sequence[Any], promotions: Mapping[int, RewardTerms]) -> None:
        """Load the committed state, before anything is fed; `promotions` are by first sequence.

        Raises `SchemaError` when it is malformed, `ConfigError` as `EnvNormalizer`.
        """
        for first in sorted(promotions):
            self.promote(first, promotions[first])
        if isinstance(state, dict) and "generations" in state:
            saved = {
                one.promoted: one.state
                for one in convert_plain("normalizer state", _NormalizersState, state).generations
            }
            oldest = min((promoted or _OWN_NORMALIZER for promoted in saved), default=_OWN_NORMALIZER)
            self._live = [one for one in self._live if one.first >= oldest]
            for one in self._live:
                if one.promoted in saved:
                    one.normalizer.load_state_dict(saved[one.promoted])
        elif state is not None:
            self._live[0].normalizer.load_state_dict(state)
        for delta in deltas:
            if isinstance(delta, dict) and "promoted" in delta:
                tagged = convert_plain("normalizer delta", _RevisionState, delta)
                for one in self._live:
                    if one.promoted == tagged.promoted:
                        one.normalizer.apply(tagged.delta)
            elif self._live[0].promoted is None:
                self._live[0].normalizer.apply(delta)
        self._end_older()
