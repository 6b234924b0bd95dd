"""Rates 1 if math-verify finds the boxed answer equal to the reference, else 0.

Adversarial input keeps a computer algebra system busy for ever and cannot be interrupted from within, so it runs in
worker processes of its own: one that is still busy when the rating's time is up is killed, and another takes its place.
"""

import importlib.util
import re
from collections import OrderedDict

import anyio
import anyio.to_process

from lachesis.pipeline.installation import install_command
from lachesis.pipeline.scoring.rater import Rater, Sample
from lachesis.pipeline.scoring.raters.answer import reference
from lachesis.pipeline.scoring.raters.boxed import boxed
from lachesis.schemas.errors import ConfigError, StartupError

__all__ = ["MathRater", "equal"]

_NUMBER = re.compile(r"[-+]?(\d[\d,]*)?\.?\d+([eE][-+]?\d+)?%?")
_MAX_CACHED_ANSWERS = 4096
_MAX_ANSWER_CHARS = 512


class MathRater(Rater):
    """`workers` processes at most. The answer is what `boxed` finds; abstains if the task has no answer."""

    name = "math"
    bounds = (0.0, 1.0)

    def __init__(self, *, workers: int = 2) -> None:
        if workers < 1:
            raise ConfigError(f"rater math: workers is {workers}; it must be at least 1.")
        if importlib.util.find_spec("math_verify") is None:
            raise StartupError(f"rater math needs the package math-verify: {install_command('raters')}")
        self._limiter = anyio.CapacityLimiter(workers)
        self._known: OrderedDict[tuple[str, str], bool] = OrderedDict()

    async def rate(self, sample: Sample) -> float | None:
        """Return 1 or 0; a comparison that takes too long is a missing rating."""
        gold, given = reference(sample), boxed(sample.completion)
        if gold is None:
            return None
        if given is None or len(gold) > _MAX_ANSWER_CHARS:
            return 0.0 if given is None else None
        if (gold, given) not in self._known:
            same = await anyio.to_process.run_sync(equal, gold, given, cancellable=True, limiter=self._limiter)
            if same is None:
                return None
            self._known[gold, given] = same
            if len(self._known) > _MAX_CACHED_ANSWERS:
                self._known.popitem(last=False)
        return float(self._known[gold, given])


def equal(gold: str, given: str) -> bool | None:
    """Return whether two answers in LaTeX say the same, None if the reference cannot be read.

    A literal number is equal to literal numbers alone: else "3+4" would pass for 7, and with it the task of finding it.
    There is no time limit: the caller kills the process, so that slowness is never taken for a wrong answer.
    """
    if gold == given:
        return True
    gold, given = (text.strip().strip("$").strip() for text in (gold, given))
    if _NUMBER.fullmatch(gold) and not _NUMBER.fullmatch(given) and not _is_fraction(given):
        return False
    from math_verify import parse, verify

    expected, answer = (parse(f"${text}$", parsing_timeout=None) for text in (gold, given))
    return bool(verify(expected, answer, timeout_seconds=None)) if expected else None


def _is_fraction(text: str) -> bool:
    return re.fullmatch(r"[-+]?(\\d?frac\{\d+\}\{\d+\}|\d+\s*/\s*\d+)", text) is not None
