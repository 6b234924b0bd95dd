"""Compares two revisions of the same rollouts. Pure.

Takes the scores and rewards of each revision's groups and returns a `Comparison`, plain data. Everything that compares
the two uses only the groups that both have.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final, NamedTuple

import msgspec

from lachesis.pipeline.normalizer.logic.accumulator import MAX_ABS_VALUE
from lachesis.pipeline.offline.compare.significance import Significance, flipped, significance
from lachesis.pipeline.offline.compare.statistics import (
    Distribution,
    distribution,
    histograms,
    rank_correlation,
    within_groups,
)
from lachesis.pipeline.scorer.logic.intervals import Interval, StreamingCI
from lachesis.pipeline.scorer.logic.krippendorff import RaterReliability
from lachesis.pipeline.scorer.logic.length_bias import LengthBias
from lachesis.schemas.annotations import GroupReward, GroupScore

__all__ = [
    "METRICS",
    "ComparedGroup",
    "ComparedRevision",
    "Comparison",
    "DisputedSample",
    "EnvDifference",
    "RaterFigures",
    "RevisionFigures",
    "RevisionPart",
    "ScoreSource",
    "compare",
    "part_names",
]

METRICS: Final = {
    "sign_flips": "share of groups, trainable in both, in which a sample's advantage changed its sign",
    "verdict_changes": "share of groups with a different verdict",
    "rank_correlation": "Spearman's rho of the scores, the lowest of any environment",
    "rank_within": "the same within a group, mean over its groups, the lowest of any environment",
    "mean_shift": "change of the mean score, the largest of any environment",
    "zero_variance_a": "share of groups without variance in A",
    "zero_variance_b": "share of groups without variance in B",
    "alpha_a": "Krippendorff's alpha of A's raters",
    "alpha_b": "Krippendorff's alpha of B's raters",
    "at_odds_a": "raters of A without which alpha lies above its own interval",
    "at_odds_b": "raters of B without which alpha lies above its own interval",
    "only_a": "groups that only A has",
    "only_b": "groups that only B has",
    "unscored_a": "groups that could not be scored in A",
    "unscored_b": "groups that could not be scored in B",
}
"""What a comparison boils down to, by name."""


class ScoreSource(NamedTuple):
    """What scored a group: the digest of its ensemble, its raters with their versions, and the `first` of the promotion
    by which it did (None: by the run's configuration)."""

    ensemble: str = ""
    raters: tuple[tuple[str, str], ...] = ()
    promoted: int | None = None


_UNKNOWN = ScoreSource()


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """One group under one revision; `reward` None: it has none (yet)."""

    env: str
    score: GroupScore
    reward: GroupReward | None
    made_by: ScoreSource = _UNKNOWN


@dataclass(frozen=True, slots=True)
class ComparedRevision:
    """A revision as read: `groups` by id, `unscored` how many could not be scored; whether all of it is there.
    `promotions`: the names of the revisions that were promoted into it, by their first sequence."""

    name: str
    groups: Mapping[str, ComparedGroup]
    unscored: int
    complete: bool
    promotions: Mapping[int, str] = field(default_factory=dict)


class RaterFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One rater: its ratings, alpha of the others (higher: it is at odds with them), `length` the correlation of its
    ratings with the length of the answer within a group, `length_bias` the same at equal ratings by the others.
    `at_odds` None: there is an alpha and no interval of it."""

    rater: str
    ratings: Distribution | None
    alpha_without: float | None
    at_odds: bool | None
    length: float | None
    length_bias: float | None = None


class RevisionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One revision: shares are of its groups with a reward. `seconds`: of rating, summed over groups; groups are rated
    side by side, so it may exceed the time it took."""

    name: str
    complete: bool
    groups: int
    unscored: int
    seconds: float
    zero_variance: float | None
    scores: Distribution | None
    rewards: Distribution | None
    length: float | None
    alpha: float | None
    alpha_interval: Interval | None
    alpha_reason: str | None
    raters: list[RaterFigures]


class RevisionPart(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one environment, sequences `first` to `last`, that were scored alike within a revision whose
    scoring was changed. `promoted`: the promoted revision by which they were; None: the configuration of then."""

    name: str
    env: str
    first: int
    last: int
    promoted: str | None
    raters: dict[str, str]
    figures: RevisionFigures


class EnvDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One environment, or a part of it, of the `groups` that both have; histograms of scores over common `edges`. `a`
    and `b` name the parts; they are the revisions where these have one."""

    env: str
    a: str
    b: str
    significance: Significance
    groups: int
    comparable: int
    flipped: int
    verdict_changes: int
    rank_correlation: float | None
    rank_within: float | None
    mean_shift: float | None
    edges: list[float]
    counts_a: list[int]
    counts_b: list[int]


class DisputedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample on which the revisions differ: `gap` is between its advantages, or its scores where it has none.
    `ratings_a`: what each rater gave it, None: missing."""

    env: str
    group: str
    seq: int
    sample: int
    gap: float
    score_a: float | None
    score_b: float | None
    advantage_a: float | None
    advantage_b: float | None
    ratings_a: dict[str, float | None] = {}
    ratings_b: dict[str, float | None] = {}


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result; `metrics` are those of `METRICS`, None where undefined. `parts`: of revisions whose scoring was
    changed."""

    run: str
    significance: Significance
    a: RevisionFigures
    b: RevisionFigures
    parts: list[RevisionPart]
    envs: list[EnvDifference]
    disputed: list[DisputedSample]
    metrics: dict[str, float | None]


def compare(run: str, a: ComparedRevision, b: ComparedRevision, *, disputed: int = 5) -> Comparison:
    """Return what differs, with the `disputed` samples that differ most, at most one a group.

    Scores, ratings and rewards beyond +-1e12, which no scorer gives, count as missing.
    """
    a, b = _within_bounds(a), _within_bounds(b)
    both = sorted(group for group in a.groups.keys() & b.groups.keys() if _alike(a.groups[group], b.groups[group]))
    names_a, names_b = part_names(a), part_names(b)
    by_part: dict[tuple[str, str, str], list[tuple[ComparedGroup, ComparedGroup]]] = {}
    for group in both:
        pair = a.groups[group], b.groups[group]
        names = _part_name(names_a, a, pair[0]), _part_name(names_b, b, pair[1])
        by_part.setdefault((pair[0].env, *names), []).append(pair)
    pairs = [pair for _, found in sorted(by_part.items()) for pair in found]
    envs = [_environment(*names, found) for names, found in sorted(by_part.items())]
    figures = _figures(a), _figures(b)
    most = sorted(
        (found for pair in pairs if (found := _dispute(*pair)) is not None),
        key=lambda one: (-one.gap, one.group),
    )
    comparable = sum(env.comparable for env in envs)
    metrics: dict[str, float | None] = {
        "sign_flips": sum(env.flipped for env in envs) / comparable if comparable else None,
        "verdict_changes": sum(env.verdict_changes for env in envs) / len(both) if both else None,
        "rank_correlation": _lowest([env.rank_correlation for env in envs]),
        "rank_within": _lowest([env.rank_within for env in envs]),
        "mean_shift": max((shift for env in envs if (shift := env.mean_shift) is not None), key=abs, default=None),
        "only_a": float(len(a.groups) - len(both)),
        "only_b": float(len(b.groups) - len(both)),
    }
    for letter, one in zip("ab", figures, strict=True):
        metrics |= {
            f"zero_variance_{letter}": one.zero_variance,
            f"alpha_{letter}": one.alpha,
            f"at_odds_{letter}": _count_at_odds(one.raters),
            f"unscored_{letter}": float(one.unscored),
        }
    return Comparison(
        run=run,
        significance=_significance(pairs),
        a=figures[0],
        b=figures[1],
        parts=[*_parts(a, names_a), *_parts(b, names_b)],
        envs=envs,
        disputed=most[:disputed],
        metrics={name: metrics[name] for name in METRICS},
    )


def _count_at_odds(raters: Sequence[RaterFigures]) -> float | None:
    """Return how many raters are at odds with the others; None if that cannot be known."""
    found = [rater.at_odds for rater in raters]
    return None if None in found else float(sum(map(bool, found)))


def _within_bounds(revision: ComparedRevision) -> ComparedRevision:
    return replace(revision, groups={group: _kept_group(one) for group, one in revision.groups.items()})


def _kept_group(one: ComparedGroup) -> ComparedGroup:
    score, reward = one.score, one.reward
    columns = [score.scores, *score.ratings.values(), *([] if reward is None else [reward.rewards])]
    if all(_is_within(x) for column in columns for x in column):
        return one
    ratings = {name: _kept(column) for name, column in score.ratings.items()}
    score = msgspec.structs.replace(score, scores=_kept(score.scores), ratings=ratings)
    reward = None if reward is None else msgspec.structs.replace(reward, rewards=_kept(reward.rewards))
    return replace(one, score=score, reward=reward)


def _kept(column: Sequence[float | None]) -> list[float | None]:
    return [x if _is_within(x) else None for x in column]


def _is_within(x: float | None) -> bool:
    return x is None or abs(x) <= MAX_ABS_VALUE


def _alike(a: ComparedGroup, b: ComparedGroup) -> bool:
    """Whether all scores and rewards are of the same samples: not where one id was given to two rollouts."""
    counts = {len(one.score.scores) for one in (a, b)}
    counts |= {len(one.reward.scores) for one in (a, b) if one.reward is not None}
    return a.env == b.env and len(counts) == 1


def _lowest(values: Sequence[float | None]) -> float | None:
    """The lowest; None where any is undefined: a minimum that leaves some out would look better than it is."""
    present = [value for value in values if value is not None]
    return min(present) if present and len(present) == len(values) else None


def part_names(revision: ComparedRevision) -> dict[tuple[str, ScoreSource], str]:
    """Return the names of a revision's parts (NAME/1, NAME/2, ...) by environment and score source.

    They are in the order of their first groups. Empty if each environment has only one part.
    """
    first: dict[tuple[str, ScoreSource], int] = {}
    for one in revision.groups.values():
        key = one.env, one.made_by
        first[key] = min(one.score.seq, first.get(key, one.score.seq))
    ordered = sorted(first, key=lambda key: (key[0], first[key]))
    counts = Counter(env for env, _ in ordered)
    numbers: Counter[str] = Counter()
    names = {}
    for key in ordered:
        if counts[key[0]] > 1:
            numbers[key[0]] += 1
            names[key] = f"{revision.name}/{numbers[key[0]]}"
    return names


def _part_name(names: Mapping[tuple[str, ScoreSource], str], revision: ComparedRevision, one: ComparedGroup) -> str:
    return names.get((one.env, one.made_by), revision.name)


def _parts(revision: ComparedRevision, names: Mapping[tuple[str, ScoreSource], str]) -> list[RevisionPart]:
    parts = []
    for (env, made_by), name in names.items():
        groups = {id_: one for id_, one in revision.groups.items() if (one.env, one.made_by) == (env, made_by)}
        seqs = [one.score.seq for one in groups.values()]
        first = made_by.promoted
        promoted = None if first is None else revision.promotions.get(first, f"promoted at {first}")
        figures = _figures(ComparedRevision(name, groups, 0, complete=True))
        parts.append(
            RevisionPart(
                name=name,
                env=env,
                first=min(seqs),
                last=max(seqs),
                promoted=promoted,
                raters=dict(made_by.raters),
                figures=figures,
            )
        )
    return parts


def _environment(
    env: str, name_a: str, name_b: str, pairs: Sequence[tuple[ComparedGroup, ComparedGroup]]
) -> EnvDifference:
    columns = [[x for pair in pairs for x in pair[side].score.scores] for side in (0, 1)]
    means = [distribution(column) for column in columns]
    within = [rank_correlation(a.score.scores, b.score.scores) for a, b in pairs]
    rewarded = [(a.reward, b.reward) for a, b in pairs if a.reward is not None and b.reward is not None]
    comparable = [(a, b) for a, b in rewarded if a.verdict == b.verdict == "trainable"]
    edges, counts_a, counts_b = histograms(columns[0], columns[1])
    return EnvDifference(
        env=env,
        a=name_a,
        b=name_b,
        significance=_significance(pairs),
        groups=len(pairs),
        comparable=len(comparable),
        flipped=sum(flipped(a, b) for a, b in comparable),
        verdict_changes=sum(a.verdict != b.verdict for a, b in rewarded),
        rank_correlation=rank_correlation(*columns),
        rank_within=fmean(known) if (known := [rho for rho in within if rho is not None]) else None,
        mean_shift=means[1].mean - means[0].mean if means[0] and means[1] else None,
        edges=edges,
        counts_a=counts_a,
        counts_b=counts_b,
    )


def _significance(pairs: Sequence[tuple[ComparedGroup, ComparedGroup]]) -> Significance:
    rewards = [(a.reward, b.reward) for a, b in pairs if a.reward is not None and b.reward is not None]
    return significance(rewards, [(a.score.scores, b.score.scores) for a, b in pairs])


def _dispute(a: ComparedGroup, b: ComparedGroup) -> DisputedSample | None:
    """Return the sample of a group that the revisions differ on most, None if on none."""
    n = len(a.score.scores)
    columns = [(one.reward.advantages if one.reward is not None else [None] * n, one.score.scores) for one in (a, b)]
    (advantages_a, scores_a), (advantages_b, scores_b) = columns
    gaps = [_gap(advantages_a[i], advantages_b[i], _gap(scores_a[i], scores_b[i], 0.0)) for i in range(n)]
    sample = max(range(n), key=lambda i: gaps[i])
    if gaps[sample] == 0:
        return None
    return DisputedSample(
        env=a.env,
        group=a.score.group,
        seq=a.score.seq,
        sample=sample,
        gap=gaps[sample],
        score_a=scores_a[sample],
        score_b=scores_b[sample],
        advantage_a=advantages_a[sample],
        advantage_b=advantages_b[sample],
        ratings_a={name: column[sample] for name, column in a.score.ratings.items()},
        ratings_b={name: column[sample] for name, column in b.score.ratings.items()},
    )


def _gap(x: float | None, y: float | None, otherwise: float) -> float:
    return otherwise if x is None or y is None else abs(x - y)


def _figures(revision: ComparedRevision) -> RevisionFigures:
    groups = list(revision.groups.values())
    scores = [one.score for one in groups]
    rewards = [one.reward for one in groups if one.reward is not None]
    zeros = sum(reward.verdict == "zero_variance" for reward in rewards)
    alpha, interval, reason, raters = _reliability(scores)
    return RevisionFigures(
        name=revision.name,
        complete=revision.complete,
        groups=len(groups),
        unscored=revision.unscored,
        seconds=math.fsum((stamp.end_ns - stamp.start_ns) / 1e9 for score in scores for stamp in score.stamps[-1:]),
        zero_variance=zeros / len(rewards) if rewards else None,
        scores=distribution([x for score in scores for x in score.scores]),
        rewards=distribution([x for reward in rewards for x in reward.rewards]),
        length=within_groups((score.scores, score.lengths) for score in scores),
        alpha=alpha,
        alpha_interval=interval,
        alpha_reason=reason,
        raters=raters,
    )


def _reliability(
    scores: Sequence[GroupScore],
) -> tuple[float | None, Interval | None, str | None, list[RaterFigures]]:
    names = sorted({name for score in scores for name in score.ratings})
    reliability = RaterReliability(names)
    streaming = StreamingCI()
    for score in scores:
        for i in range(len(score.scores)):
            unit = {name: column[i] for name, column in score.ratings.items()}
            reliability.add_unit(unit)
            streaming.add_unit(score.group, list(unit.values()))
    whole, interval = reliability.whole.alpha(), streaming.interval()
    without, bias = reliability.leave_one_out(), LengthBias.of(scores)
    raters = []
    for name in names:
        columns = [(score.ratings[name], score.lengths) for score in scores if name in score.ratings]
        alone = without[name].value
        raters.append(
            RaterFigures(
                rater=name,
                ratings=distribution([x for column, _ in columns for x in column]),
                alpha_without=alone,
                at_odds=_is_at_odds(alone, whole.value, interval),
                length=within_groups(columns),
                length_bias=bias.get(name),
            )
        )
    return whole.value, interval, whole.reason, raters


def _is_at_odds(alone: float | None, together: float | None, interval: Interval | None) -> bool | None:
    if alone is None or together is None or alone <= together:
        return False  # the others are one, or do not agree better without it
    return None if interval is None else alone > interval.high
