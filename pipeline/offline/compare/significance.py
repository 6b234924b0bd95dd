"""Estimates whether the difference between two revisions matters for training. Pure.

A difference matters if the trainer would act differently: a group that one revision trains on and the other does not,
or a sample that one pushes the other way. A score that moves alike in a whole group changes nothing, since advantages
compare the samples of a group. Intervals are of 95 %: Wilson's for shares, Student's by the normal for means over
groups.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import msgspec

from lachesis.pipeline.common.number_arguments import plain_numbers
from lachesis.schemas.annotations import GroupReward
from lachesis.schemas.errors import DataError

__all__ = ["MATTERS_FROM_SHARE", "Significance", "flipped", "mean_interval", "share_interval", "significance"]

MATTERS_FROM_SHARE = 0.05
"""Share of groups that would be trained on otherwise from which on a difference matters."""
_Z = 1.96


class Significance(msgspec.Struct, frozen=True, kw_only=True):
    """`matters`: None if the groups are too few to decide. Of `groups` with rewards in both revisions, `changed` would
    be trained on differently, a share between `low` and `high`; `shift`: change of the mean score, with its
    interval."""

    matters: bool | None
    groups: int
    changed: int
    flipped: int
    verdicts: int
    low: float
    high: float
    shift: tuple[float, float, float] | None
    sentence: str


def flipped(a: GroupReward, b: GroupReward) -> bool:
    """Whether a sample that was pushed one way is pushed the other; to 0 or from it is no change of sign."""
    return any(x is not None and y is not None and x * y < 0 for x, y in zip(a.advantages, b.advantages, strict=True))


def significance(
    rewards: Sequence[tuple[GroupReward, GroupReward]], scores: Sequence[tuple[Sequence[float | None], ...]]
) -> Significance:
    """Return what the pairs of rewards, and the pairs of scores by sample, of the same groups come to."""
    verdicts = sum(a.verdict != b.verdict for a, b in rewards)
    flips = sum(a.verdict == b.verdict == "trainable" and flipped(a, b) for a, b in rewards)
    changed, groups = verdicts + flips, len(rewards)
    low, high = share_interval(changed, groups)
    matters = True if low >= MATTERS_FROM_SHARE else False if high < MATTERS_FROM_SHARE else None
    shift = mean_interval([change for a, b in scores if (change := _mean_change(a, b)) is not None])
    same = groups > 0 and not changed and all(list(a) == list(b) for a, b in scores)
    found = Significance(
        matters=False if same else matters,
        groups=groups,
        changed=changed,
        flipped=flips,
        verdicts=verdicts,
        low=low,
        high=high,
        shift=shift,
        sentence="",
    )
    return msgspec.structs.replace(found, sentence=_sentence(found, same=same))


def share_interval(count: int, total: int) -> tuple[float, float]:
    """Return between which shares the true one lies with 95 % confidence (Wilson); (0, 1) of nothing.

    Raises `DataError` unless `count` is a number of 0 or more, and at most `total`.
    """
    if not (isinstance(count, int) and isinstance(total, int) and 0 <= count <= total):
        raise DataError(f"share of {count!r:.40} in {total!r:.40}: give whole numbers, 0 <= count <= total.")
    if total == 0:
        return 0.0, 1.0
    share, z2 = count / total, _Z * _Z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the mean, and between which values the true one lies with 95 % confidence.

    None below two values. Raises `DataError` on what is no finite number.
    """
    values = plain_numbers("value", values)
    if len(values) < 2:
        return None
    mean, half = fmean(values), _Z * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def _mean_change(a: Sequence[float | None], b: Sequence[float | None]) -> float | None:
    changes = [y - x for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return fmean(changes) if changes else None


def _sentence(found: Significance, *, same: bool) -> str:
    if found.groups == 0:
        return "It is unknown whether the difference matters: no group has a reward in both revisions."
    if same:
        return f"There is no difference: in all of {found.groups} groups scores and verdicts are the same."
    share = f"{found.changed} of {found.groups} groups would be trained on otherwise"
    between = f"{found.low:.1%} to {found.high:.1%} with 95 % confidence"
    kinds = f"in {found.flipped} a sample is pushed the other way, {found.verdicts} have another verdict"
    shift = ""
    if found.shift is not None:
        mean, low, high = found.shift
        shift = f"; the mean score moves by {mean:+.3g} ({low:+.3g} to {high:+.3g})"
    if found.matters:
        return f"The difference matters: {share} ({between}): {kinds}{shift}."
    if found.matters is False:
        return f"The difference hardly matters for training: {share} ({between}){shift}."
    return (
        f"It is unknown whether the difference matters from {found.groups} groups: {share}, which may mean anything "
        f"from {found.low:.1%} to {found.high:.1%}, where {MATTERS_FROM_SHARE:.0%} matters{shift}; compare more of the "
        "history."
    )
