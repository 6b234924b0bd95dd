"""Checks for gains of one rater of which another one, which agreed with it, thinks less than before."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import msgspec

from lachesis.pipeline.health.logic.check import Check, CheckResult, HealthWindow, finite, is_number, mean
from lachesis.pipeline.health.logic.trends import correlation, student_z
from lachesis.schemas.alerts import Severity
from lachesis.schemas.annotations import GroupScore
from lachesis.schemas.values import convert_plain

__all__ = ["UnconfirmedGain"]

_POINT_GROUPS = 64
_LEARNING_POINTS = 8
"""Points from which is learned which raters agree, the first apart: it says what a high rating is."""
_EARLY_POINTS = 24
"""Points after that in which form may be learned before what is worth more."""
_MIN_BEFORE, _MIN_NOW = 8, 2
"""Points that are compared at least."""
_MIN_SAMPLES, _MIN_GROUPS = 30, 16
_MIN_AGREEMENT = 0.2
"""Correlation from which on a rater can confirm what another says."""
_MIN_FALL = 0.05
"""Share of the difference between what is rated high and low that a fall has to be."""
_WARN_Z, _QUARANTINE_Z = 4.0, 5.5
_RISE_Z, _FORGET_Z, _USUAL_Z = 2.0, 3.0, 2.0
_USUAL_POINTS = 4
_BUCKETS = 2
"""Buckets of one size: those of a run of 8000 groups are some 13."""
_MAX_RATERS, _MAX_SKILLS = 6, 8
"""Raters that are compared, 30 pairs, and skills that are looked at apart."""
_STATE_VERSION = 2


class _Group(msgspec.Struct, array_like=True):
    score: float | None
    skill: str | None
    logs: list[float]
    ratings: dict[str, list[float | None]]


class _Learning(msgspec.Struct, array_like=True):
    """Sums over the first groups, of raters x and y and of the logarithm of length, l: centred within groups, and of y
    over the samples that x rates high and over the others."""

    x: str
    y: str
    xy: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xl: float = 0.0
    yl: float = 0.0
    ll: float = 0.0
    high: int = 0
    high_y: float = 0.0
    low: int = 0
    low_y: float = 0.0
    groups: int = 0
    means: float = 0.0
    squares: float = 0.0
    noise: float = 0.0
    """Of y's group means: their sum, that of their squares, and of the squared errors that independent samples give."""

    def add(self, rows: Sequence[tuple[float, float, float]], threshold: float) -> None:
        """Take in a group's samples, as (x, y, l)."""
        within = self.yy
        for x, y, length in _centred(rows):
            self.xy += x * y
            self.xx += x * x
            self.yy += y * y
            self.xl += x * length
            self.yl += y * length
            self.ll += length * length
        if len(rows) > 1:
            middle = sum(y for _, y, _ in rows) / len(rows)
            self.groups += 1
            self.means += middle
            self.squares += middle * middle
            self.noise += (self.yy - within) / (len(rows) * (len(rows) - 1))
        high = [row for row in rows if row[0] > threshold]
        self.high += len(high)
        self.high_y += sum(y for _, y, _ in high)
        self.low += len(rows) - len(high)
        self.low_y += sum(y for x, y, _ in rows if x <= threshold)

    @property
    def ranks(self) -> bool:
        """Whether y compares the samples of a group alone: then its group means differ less than by chance."""
        spread = self.squares - self.means * self.means / max(1, self.groups)
        return spread < 0.5 * self.noise

    def agreement(self) -> float:
        """Return the correlation of x and y within groups, of what length does not explain."""
        xy, xx, yy = self.xy, self.xx, self.yy
        if self.ll > 0:
            xy -= self.xl * self.yl / self.ll
            xx -= self.xl * self.xl / self.ll
            yy -= self.yl * self.yl / self.ll
        return correlation(xy, xx, yy) or 0.0


class _Witness(msgspec.Struct, array_like=True):
    """What the first groups say of y as a witness of x: by how much more it gives what x rates high (`contrast`).
    `high`: above it x rates high."""

    x: str
    y: str
    high: float
    contrast: float


class _Bucket(msgspec.Struct, array_like=True):
    """Sums over the groups of some points. Of a group: n samples that x rates high, the sums of their ratings by y and
    of the logarithms of their lengths l, products of these sums, and those of deviations within the group, of which
    `free` are independent; and its mean score."""

    points: int = 0
    groups: int = 0
    n: float = 0.0
    nn: float = 0.0
    y: float = 0.0
    ny: float = 0.0
    yy: float = 0.0
    length: float = 0.0
    nl: float = 0.0
    yl: float = 0.0
    ll: float = 0.0
    free: float = 0.0
    within_yy: float = 0.0
    within_yl: float = 0.0
    within_ll: float = 0.0
    scored: int = 0
    score: float = 0.0
    squares: float = 0.0

    def __add__(self, other: "_Bucket") -> "_Bucket":
        return _Bucket(
            *(a + b for a, b in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True))
        )

    def __sub__(self, other: "_Bucket") -> "_Bucket":
        return _Bucket(
            *(a - b for a, b in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True))
        )

    @property
    def enough(self) -> bool:
        return self.n >= _MIN_SAMPLES and self.groups >= _MIN_GROUPS

    def rating(self) -> tuple[float, float]:
        """Return y's mean of what x rates high, with its squared error; samples of a group are alike."""
        return _ratio(self.y, self.yy, self.ny, self)

    def rating_beside_length(self, slope: float) -> tuple[float, float]:
        """Return the same of ratings less `slope` times the logarithm of length."""
        squares = self.yy - 2 * slope * self.yl + slope * slope * self.ll
        return _ratio(self.y - slope * self.length, squares, self.ny - slope * self.nl, self)

    def slope(self) -> tuple[float, float]:
        """Return by how much y rises with the logarithm of length within groups, with its squared error."""
        if self.within_ll <= 0:
            return 0.0, 0.0
        slope = self.within_yl / self.within_ll
        left = max(0.0, self.within_yy - slope * self.within_yl)
        return slope, left / max(1.0, self.free - 1) / self.within_ll


class _Comparison(NamedTuple):
    """The groups before against those since: y's mean of what x rates high fell by z standard errors, with and without
    what length explains."""

    z: float
    z_beside_length: float
    before: float
    now: float
    groups: int

    @property
    def fall_z(self) -> float:
        return min(self.z, self.z_beside_length)


class _Finding(NamedTuple):
    z: float
    witness: _Witness
    skill: str
    fall: _Comparison


class _Series(msgspec.Struct):
    """Buckets of points, the oldest first: of each size 1, 2, 4 ... at most two (Bifet & Gavalda 2007, ADWIN).
    `forgotten` points came before them."""

    buckets: list[_Bucket] = []
    forgotten: int = 0

    def add(self, bucket: _Bucket) -> None:
        """Take in a point, and join older ones so that their number grows with the logarithm of the run's length."""
        self.buckets.append(bucket)
        size = 1
        while len(same := [i for i, kept in enumerate(self.buckets) if kept.points == size]) > _BUCKETS:
            first = same[0]
            self.buckets[first : first + 2] = [self.buckets[first] + self.buckets[first + 1]]
            size *= 2

    def find_fall(self, witness: _Witness) -> _Comparison | None:
        """Return the clearest fall while what x rates high and the score rise, None if there is none."""
        while self._has_learned(splits := list(self._splits())):
            self.forgotten += self.buckets.pop(0).points
        found = None
        for place, before, now, compared in splits:
            if compared.fall_z > max(_WARN_Z, found.fall_z if found else 0.0) and (
                before.points >= _MIN_BEFORE
                and not self._is_early(before)
                and compared.before - compared.now > _MIN_FALL * witness.contrast
                and _rises(before, now)
                and not self._was_as_low(place, compared)
            ):
                found = compared
        return found

    def _splits(self) -> Iterator[tuple[int, _Bucket, _Bucket, _Comparison]]:
        """Yield each split with enough on both sides: how many buckets are before it, and both sides compared."""
        whole = sum(self.buckets, _Bucket())
        before = _Bucket()
        for place, bucket in enumerate(self.buckets[:-1], start=1):
            before = before + bucket
            now = whole - before
            if now.points >= _MIN_NOW and before.enough and now.enough:
                yield place, before, now, _compare(before, now)

    def _has_learned(self, splits: Iterable[tuple[int, _Bucket, _Bucket, _Comparison]]) -> bool:
        """Return whether y's mean rose, or fell from early on: then the oldest groups no longer say what is usual."""
        return any(
            compared.z < -_FORGET_Z
            or (compared.fall_z > _FORGET_Z and now.points >= _MIN_BEFORE and self._is_early(before))
            for _, before, now, compared in splits
        )

    def _is_early(self, before: _Bucket) -> bool:
        return self.forgotten + before.points < _EARLY_POINTS

    def _was_as_low(self, place: int, compared: _Comparison) -> bool:
        """Return whether a stretch before lies below the others for certain, and as low: tasks may come in waves."""
        stretch = _Bucket()
        for bucket in self.buckets[:place]:
            stretch = stretch + bucket
            if stretch.points < _USUAL_POINTS:
                continue
            if stretch.enough:
                low, square = stretch.rating()
                if low <= compared.now and compared.before - low > _USUAL_Z * math.sqrt(square):
                    return True
            stretch = _Bucket()
        return False


class UnconfirmedGain(Check):
    """Rater x rates more and more samples high, the score rises, and of what x rates high another rater y thinks less
    than it did before.

    If two raters judge one quality, each with its own errors, then as quality rises so does y's mean of what x rates
    high: among these the share of good ones grows (Bayes; Milgrom 1981, monotone likelihood ratios). It falls if x is
    paid for something that y does not see as quality, be it that y rates it low or only lower than what was good.
    "High" is above the mean of the first 64 groups. After 448 groups more y is a witness of x if both agreed on which
    samples of a group are better: r > .2, of what length does not explain. A rater that ranks the samples of a group is
    no witness, since its mean cannot rise.

    Every split of the run so far is compared, by the errors of the means over groups, at logarithmically many places:
    in all groups, and in each of at most eight skills. z > 4 warns, and quarantines if it lasts; z > 5.5 quarantines.
    The fall has to be certain with and without what length explains, by how much y follows it within the groups before
    the split, and more than a twentieth of the difference between what x rates high and low. If an earlier stretch lay
    as low, tasks come in waves, and it is no fall. Groups before a rise are forgotten, since learning raises what is
    usual. So are those before a fall that begins in the first 2,048 groups, in which form may be learned before what is
    worth more. Of more than six raters, the first six by name are compared. The value is z.
    """

    name = "unconfirmed_gain"

    def __init__(self) -> None:
        self._left: list[_Group] = []
        self._points = 0
        self._high: dict[str, float] = {}  # by rater, above it a rating is high
        self._learning: dict[str, _Learning] = {}  # by pair "x y", as the next two
        self._witnesses: dict[str, _Witness] = {}
        self._series: dict[str, dict[str, _Series]] = {}  # by skill; "": all groups
        self._skills: dict[str, int] = {}

    def evaluate(self, window: HealthWindow) -> CheckResult:
        self._left += [_group(score) for score in window.scores]
        while len(self._left) >= _POINT_GROUPS:
            self._record(self._left[:_POINT_GROUPS])
            del self._left[:_POINT_GROUPS]
        if self._points <= _LEARNING_POINTS:
            return CheckResult("idle", reason="later groups are compared with the first ones")
        if not self._witnesses:
            return CheckResult("idle", reason="no two raters agree on which samples of a group are better")
        worst = max(self._findings(), key=lambda found: found.z, default=None)
        if worst is None:
            return CheckResult("ok", 0.0, _WARN_Z)
        where = f" in {worst.skill}" if worst.skill else ""
        reason = (
            f"the score rises by {worst.witness.x}, and of what it rates high{where} {worst.witness.y} thinks less "
            f"than before, {worst.fall.before:.2f} -> {worst.fall.now:.2f} (z = {worst.z:.1f}) in the last "
            f"{worst.fall.groups} groups"
        )
        severity: Severity = "quarantine" if worst.z > _QUARANTINE_Z else "warn"
        return CheckResult(severity, worst.z, _WARN_Z, reason, window.newest, grows=True)

    def _findings(self) -> Iterator[_Finding]:
        for pair, by_skill in self._series.items():
            for skill, series in by_skill.items():
                found = series.find_fall(self._witnesses[pair])
                if found is not None:
                    yield _Finding(found.fall_z, self._witnesses[pair], skill, found)

    def _record(self, groups: Sequence[_Group]) -> None:
        """Take in a point: first what a high rating is, then which raters agree, then what they say."""
        for pair, witness in self._witnesses.items():
            self._extend(self._series[pair], witness, groups)
        names = sorted({name for group in groups for name in group.ratings})[:_MAX_RATERS]
        for x, y in permutations([name for name in names if name in self._high], 2):
            if f"{x} {y}" not in self._witnesses:
                learning = self._learning.setdefault(f"{x} {y}", _Learning(x, y))
                for group in groups:
                    learning.add(_rows(group, x, y), self._high[x])
        for name in names:
            level = mean(value for group in groups for value in group.ratings.get(name, ()))
            if name not in self._high and level is not None:
                self._high[name] = level
        if self._points < _LEARNING_POINTS:
            self._skills = dict(Counter(self._skills) + Counter(group.skill for group in groups if group.skill))
        self._points += 1
        if self._points % _LEARNING_POINTS == 0:
            self._find_witnesses()

    def _find_witnesses(self) -> None:
        """Follow the pairs that agree; for the others begin to learn again."""
        skills = sorted(self._skills, key=lambda skill: (-self._skills[skill], skill))[:_MAX_SKILLS]
        for pair, learning in self._learning.items():
            witness = _witness(learning, self._high[learning.x])
            if witness is not None:
                self._witnesses[pair] = witness
                self._series[pair] = {skill: _Series() for skill in ["", *(skills if len(skills) > 1 else ())]}
        self._learning = {}

    def _extend(self, by_skill: Mapping[str, _Series], witness: _Witness, groups: Sequence[_Group]) -> None:
        rows = [(group.skill, _said(group, witness)) for group in groups]
        for skill, series in by_skill.items():
            series.add(_bucket([said for own, said in rows if skill in {"", own}]))

    def state_dict(self) -> dict[str, Any]:
        state = {
            "left": self._left, "points": self._points, "high": self._high, "learning": self._learning,
            "witnesses": self._witnesses, "series": self._series, "skills": self._skills,
        }  # fmt: skip
        return {"version": _STATE_VERSION, **{name: msgspec.to_builtins(value) for name, value in state.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != _STATE_VERSION:  # of a build that compared other sums
            return
        self._left = convert_plain("health state", list[_Group], state["left"])
        self._points = convert_plain("health state", int, state["points"])
        self._high = convert_plain("health state", dict[str, float], state["high"])
        self._learning = convert_plain("health state", dict[str, _Learning], state["learning"])
        self._witnesses = convert_plain("health state", dict[str, _Witness], state["witnesses"])
        self._series = convert_plain("health state", dict[str, dict[str, _Series]], state["series"])
        self._skills = convert_plain("health state", dict[str, int], state["skills"])


def _group(score: GroupScore) -> _Group:
    logs = [math.log(max(1, length)) for length in score.lengths] or [0.0] * len(score.scores)
    ratings = {name: list(column) for name, column in score.ratings.items() if any(True for _ in finite(column))}
    return _Group(mean(score.scores), score.skill, logs, ratings)


def _rows(group: _Group, x: str, y: str) -> list[tuple[float, float, float]]:
    """Return (x, y, log of length) of the samples that both rate."""
    if x not in group.ratings or y not in group.ratings:
        return []
    columns = zip(group.ratings[x], group.ratings[y], group.logs, strict=True)
    return [(a, b, log) for a, b, log in columns if is_number(a) and is_number(b)]


def _centred(rows: Sequence[tuple[float, float, float]]) -> Iterator[tuple[float, float, float]]:
    if not rows:
        return
    n = len(rows)
    x, y, length = (sum(column) / n for column in zip(*rows, strict=True))
    for row in rows:
        yield row[0] - x, row[1] - y, row[2] - length


def _witness(learning: _Learning, threshold: float) -> _Witness | None:
    """Return what y says of x, None if they hardly agree, or if y ranks within groups."""
    if learning.high < _MIN_SAMPLES or not learning.low or learning.ranks or learning.agreement() < _MIN_AGREEMENT:
        return None
    contrast = learning.high_y / learning.high - learning.low_y / learning.low
    if contrast <= 0:
        return None
    return _Witness(learning.x, learning.y, threshold, contrast)


class _Opinion(NamedTuple):
    """What y says of the samples of a group that x rates high: how many, and sums as those of `_Bucket`."""

    n: int
    y: float
    length: float
    within_yy: float
    within_yl: float
    within_ll: float
    score: float | None


def _said(group: _Group, witness: _Witness) -> _Opinion:
    high = [row for row in _rows(group, witness.x, witness.y) if row[0] > witness.high]
    yy = yl = ll = 0.0
    for _, y, length in _centred(high):
        yy, yl, ll = yy + y * y, yl + y * length, ll + length * length
    ratings, lengths = sum(row[1] for row in high), sum(row[2] for row in high)
    return _Opinion(len(high), ratings, lengths, yy, yl, ll, group.score)


def _bucket(groups: Sequence[_Opinion]) -> _Bucket:
    scores = [group.score for group in groups if group.score is not None]
    return _Bucket(
        points=1,
        groups=len(groups),
        n=sum(group.n for group in groups),
        nn=sum(group.n * group.n for group in groups),
        y=sum(group.y for group in groups),
        ny=sum(group.n * group.y for group in groups),
        yy=sum(group.y * group.y for group in groups),
        length=sum(group.length for group in groups),
        nl=sum(group.n * group.length for group in groups),
        yl=sum(group.y * group.length for group in groups),
        ll=sum(group.length * group.length for group in groups),
        free=sum(max(0, group.n - 1) for group in groups),
        within_yy=sum(group.within_yy for group in groups),
        within_yl=sum(group.within_yl for group in groups),
        within_ll=sum(group.within_ll for group in groups),
        scored=len(scores),
        score=sum(scores),
        squares=sum(score * score for score in scores),
    )


def _ratio(total: float, squares: float, products: float, of: _Bucket) -> tuple[float, float]:
    """Return a mean over samples, and its squared error with groups as the unit of chance."""
    value = total / of.n
    spread = max(0.0, squares - 2 * value * products + value * value * of.nn)
    return value, spread / of.n**2 * of.groups / max(1, of.groups - 1)


def _compare(before: _Bucket, now: _Bucket) -> _Comparison:
    (first, first_square), (last, last_square) = before.rating(), now.rating()
    slope, slope_square = before.slope()
    part, part_square = before.rating_beside_length(slope)
    last_part, last_part_square = now.rating_beside_length(slope)
    grown = now.length / now.n - before.length / before.n
    degrees = min(before.groups, now.groups) - 1
    return _Comparison(
        _z(first - last, first_square + last_square, degrees),
        _z(part - last_part, part_square + last_part_square + slope_square * grown * grown, degrees),
        first,
        last,
        now.groups,
    )


def _z(difference: float, square: float, degrees: int) -> float:
    return student_z(difference / max(math.sqrt(square), 1e-9), degrees)


def _rises(before: _Bucket, now: _Bucket) -> bool:
    """Return whether x rates more samples of a group high than before, and groups score more."""
    counts = _difference((before.groups, before.n, before.nn), (now.groups, now.n, now.nn))
    scores = _difference((before.scored, before.score, before.squares), (now.scored, now.score, now.squares))
    return min(counts, scores) > _RISE_Z


def _difference(before: tuple[int, float, float], now: tuple[int, float, float]) -> float:
    """Return by how many standard errors the mean of the second exceeds the first; each is (count, sum, squares)."""
    square, means = 0.0, []
    for count, total, squares in (before, now):
        if count < 2:
            return 0.0
        means.append(total / count)
        square += max(0.0, squares / count - means[-1] ** 2) / (count - 1)
    return (means[1] - means[0]) / max(math.sqrt(square), 1e-9)
