"""Rates an answer with the scorer of the reasoning-gym dataset that its task comes from."""

import importlib.metadata
from typing import Any

from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.extensions.reasoning_gym.datasets import import_reasoning_gym, score_answer
from lachesis.pipeline.scorer.rater import Rater, Sample
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["ReasoningGymRater"]


class ReasoningGymRater(Rater):
    """Scores answers to tasks of the kind `reasoning_gym`; `params` are the dataset's, where it needs them.

    Some scorers can hang on hostile text: the rating then times out, and the thread it ran in is lost.
    """

    name = "reasoning_gym"
    bounds = (0.0, 1.0)

    def __init__(self, params: dict[str, Any] | None = None) -> None:
        try:
            import_reasoning_gym()
            # another release may score differently, so it is part of the version that the ensemble's digest holds
            self.version = f"1+{importlib.metadata.version('reasoning-gym')}"
        except (ImportError, StartupError) as error:
            raise ConfigError(f"rater reasoning_gym: {error}") from error
        self._params = params

    def rate(self, sample: Sample) -> float | None:
        """Return the dataset's own score, in [0, 1].

        Raises DataError if the task is not one of reasoning-gym's.
        """
        missing = {"dataset", "question", "answer", "metadata"} - sample.task.keys()
        if missing:
            raise DataError(
                f"item {sample.item}: the task lacks {sorted(missing)}; reasoning_gym environments give them."
            )
        return score_answer(sample.completion, sample.task, self._params)
