"""Rates 1 if the boxed answer equals the reference, else 0.

Numbers and words are compared at once. Adversarial input keeps a computer algebra system busy for ever and cannot be
interrupted from within, so it runs in worker processes of its own: one that is still busy when the rating's time is up
is killed, and another takes its place.
"""

import importlib.util
from collections import OrderedDict

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.scorer.answers.compare_math import equal, equal_or_unsure, reference_answer
from lachesis.pipeline.scorer.answers.given_and_reference import best_of, references
from lachesis.pipeline.scorer.answers.last_box import boxed
from lachesis.pipeline.scorer.rater import Rater, Sample
from lachesis.pipeline.scorer.worker_process import WorkerProcesses
from lachesis.schemas.errors import ConfigError

__all__ = ["MathRater"]

_MAX_CACHED_ANSWERS = 4096
_MAX_ANSWER_CHARS = 512
_MIN_MEMORY_MB = 64


class MathRater(Rater):
    """`workers` processes at most, each with `memory_mb` for its comparisons. The answer is what `boxed` finds;
    abstains if the task has no answer.
    """

    name = "math"
    version = "5"
    bounds = (0.0, 1.0)

    def __init__(self, *, workers: int = 2, memory_mb: int = 256) -> None:
        if workers < 1:
            raise ConfigError(f"rater math: workers is {workers}; it must be at least 1.")
        if memory_mb < _MIN_MEMORY_MB:
            raise ConfigError(f"rater math: memory_mb is {memory_mb}; it must be at least {_MIN_MEMORY_MB}.")
        if importlib.util.find_spec("math_verify") is None:
            raise StartupError(f"rater math needs the package math-verify: {install_command('raters')}")
        self.calls_at_once = workers
        self._workers = WorkerProcesses(workers, memory_mb << 20)
        self._known: OrderedDict[tuple[str, str], bool] = OrderedDict()

    async def rate(self, sample: Sample) -> float | None:
        """Return 1 or 0; one that takes too long is a missing rating.

        Raises `AnswerTooLargeError` where an answer takes too much memory: that is a missing rating too.
        """
        given = boxed(sample.text)
        ratings = []
        for reference in references(sample):
            ratings.append(await self._rate(reference_answer(reference), given))
            if ratings[-1] == 1.0:
                break
        return best_of(ratings)

    async def _rate(self, gold: str, given: str | None) -> float | None:
        if given is None or len(gold) > _MAX_ANSWER_CHARS:
            return 0.0 if given is None else None
        if (gold, given) not in self._known:
            same = equal_or_unsure(gold, given)
            if same == "unsure":
                what = f"compared {given[:80]!r} with {gold[:80]!r}"
                same = await self._workers.call(what, equal, gold, given)
            if not isinstance(same, bool):
                return None
            self._known[gold, given] = same
            if len(self._known) > _MAX_CACHED_ANSWERS:
                self._known.popitem(last=False)
        return float(self._known[gold, given])
