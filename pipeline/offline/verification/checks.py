"""Checks ratings, advantages and losses numerically. Pure: takes measured values, returns findings."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.estimators.loader import group_advantage
from lachesis.pipeline.scorer.logic.accuracy import rater_accuracies
from lachesis.schemas.errors import DataError

__all__ = [
    "CheckVerdict",
    "NumericFinding",
    "accuracy",
    "advantage_stability",
    "determinism",
    "distribution",
    "loss_agreement",
]

Ratings = Mapping[str, Sequence[float | None]]
"""Rater -> one rating a sample."""

CheckVerdict = Literal["ok", "warn", "fail"]

_MIN_SPREAD = 1e-9
_END_SHARE = 0.01
"""Share of a rater's bounds that counts as one end of them."""
_MAX_SHARE_AT_AN_END = 0.95
_MAX_MISSING_SHARE = 0.1
_NOISE = 1e-9
_MIN_SCALE = 1e-6
"""Losses and norms that are smaller are compared by this: those of answers that are all alike are 0."""


class NumericFinding(msgspec.Struct, frozen=True, kw_only=True):
    """`warn` is worth a look, `fail` makes a run worthless; the text says what was measured."""

    check: str
    subject: str
    verdict: CheckVerdict
    text: str


def determinism(runs: Sequence[Ratings], *, atol: float = 1e-6) -> list[NumericFinding]:
    """Compare repeated ratings of the same samples, rater by rater.

    A rating that is missing at times differs, too.
    """
    found = []
    for rater in runs[0]:
        columns = [list(run[rater]) for run in runs]
        widest, unsteady = 0.0, 0
        for values in zip(*columns, strict=True):
            known = [value for value in values if value is not None]
            spread = max(known) - min(known) if known else 0.0
            widest = max(widest, spread)
            unsteady += spread > atol or 0 < len(known) < len(values)
        n = len(columns[0])
        text = f"{unsteady} of {n} samples differ over {len(runs)} runs, by {widest:.3g} at most"
        found.append(
            NumericFinding(check="determinism", subject=rater, verdict="fail" if unsteady else "ok", text=text)
        )
    return found


def distribution(ratings: Ratings, bounds: Mapping[str, tuple[float, float]]) -> list[NumericFinding]:
    """Find raters that say nothing.

    Their ratings are all alike, nearly all at one end of their bounds, or often missing.
    """
    found = []
    for rater, column in ratings.items():
        values = np.array([value for value in column if value is not None])
        missing = 1 - len(values) / len(column) if column else 1.0
        if not len(values):
            found.append(NumericFinding(check="distribution", subject=rater, verdict="fail", text="no rating at all"))
            continue
        low, high = bounds[rater]
        near = _END_SHARE * (high - low)
        at_low, at_high = float(np.mean(values <= low + near)), float(np.mean(values >= high - near))
        text = (
            f"mean {values.mean():.3g}, std {values.std():.3g}, {values.min():.3g} to {values.max():.3g} "
            f"of [{low:g}, {high:g}], {missing:.0%} missing"
        )
        verdict: CheckVerdict = "ok"
        if values.std() < _MIN_SPREAD:
            verdict, text = "warn", f"every rating is {values[0]:.6g}: it does not distinguish answers; {text}"
        elif max(at_low, at_high) > _MAX_SHARE_AT_AN_END:
            end = "lowest" if at_low > at_high else "highest"
            verdict, text = "warn", f"{max(at_low, at_high):.0%} lie at the {end} rating; {text}"
        elif missing > _MAX_MISSING_SHARE:
            verdict = "warn"
        found.append(NumericFinding(check="distribution", subject=rater, verdict=verdict, text=text))
    return found


def accuracy(ratings: Ratings, threshold: float) -> list[NumericFinding]:
    """Estimate how often each rater's verdict (a calibrated rating above `threshold`) is right.

    Empty for too few raters. No label is needed, but raters must err apart from each other: those that share an error
    confirm each other.
    """
    columns = [[(rater, value) for value in column] for rater, column in ratings.items()]
    samples = [{rater: value > threshold for rater, value in row if value is not None}
               for row in zip(*columns, strict=True)]  # fmt: skip
    try:
        fitted = rater_accuracies(samples)
    except ValueError:
        return []
    return [
        NumericFinding(
            check="accuracy",
            subject=rater,
            verdict="ok" if found.weight > 0 else "warn",
            text=f"right in {found.accuracy:.1%} of {found.verdicts} verdicts, by the other raters; as a vote of "
            f"dawid_skene it weighs {found.weight:.3f}",
        )
        for rater, found in fitted.items()
    ]


def advantage_stability(
    groups: Sequence[Sequence[float | None]],
    config: AdvantageConfig,
    lengths: Sequence[Sequence[int]],
    *,
    tolerance: float = 1e-3,
) -> NumericFinding:
    """Disturb rewards by a billionth of their size and see whether advantages stay.

    Rounding must not decide them. Estimator gdpo is checked as grpo, which is what it applies to each component. One
    that needs what only a run has, or refuses these rewards, is not checked.
    """
    checked = AdvantageConfig(estimator="grpo", std_floor=config.std_floor) if config.estimator == "gdpo" else config
    rng = np.random.default_rng(0)
    worst, flipped, n = 0.0, 0, 0
    for rewards, length in zip(groups, lengths, strict=True):
        noise = 1.0 + _NOISE * rng.standard_normal(len(rewards))
        disturbed = [None if r is None else r * f for r, f in zip(rewards, noise.tolist(), strict=True)]
        try:
            before, after = (group_advantage(column, checked, length) for column in (rewards, disturbed))
        except DataError as error:
            text = f"not checked: {error}"
            return NumericFinding(check="advantage stability", subject=config.estimator, verdict="warn", text=text)
        flipped += before.verdict != after.verdict
        n += 1
        for one, other in zip(before.advantages, after.advantages, strict=True):
            if one is not None and other is not None:
                worst = max(worst, abs(one - other))
    steady = worst <= tolerance and not flipped and math.isfinite(worst)
    text = f"{n} groups, rewards disturbed by 1e-9: advantages move by {worst:.2g} at most, {flipped} verdicts change"
    return NumericFinding(
        check="advantage stability", subject=config.estimator, verdict="ok" if steady else "fail", text=text
    )


def loss_agreement(losses: Mapping[str, float], norms: Mapping[str, float], *, rtol: float = 0.05) -> NumericFinding:
    """Compare the loss and gradient norm of one batch in several dtypes; the first is the reference."""
    (name, loss), *others = losses.items()
    norm, worst = norms[name], 0.0
    for other, value in others:
        apart = abs(value - loss) / max(abs(loss), _MIN_SCALE), abs(norms[other] - norm) / max(norm, _MIN_SCALE)
        worst = max(worst, *apart)
    text = ", ".join(f"{kind}: loss {losses[kind]:.6g}, gradient norm {norms[kind]:.6g}" for kind in losses)
    steady = worst <= rtol and all(map(math.isfinite, (*losses.values(), *norms.values())))
    return NumericFinding(
        check="loss",
        subject=" and ".join(losses),
        verdict="ok" if steady else "warn",
        text=f"{text}; {worst:.1%} apart",
    )
