"""Rates an answer with the scorer of the reasoning-gym dataset that its task comes from."""

import importlib.metadata
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from lachesis.pipeline.scoring.rater import Rater, Sample
from lachesis.pipeline.scoring.raters.answer import given
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["ReasoningGymRater"]


class ReasoningGymRater(Rater):
    """`dataset` names the dataset; by default the task's metadata does (`source_dataset`).

    The task holds the dataset's entry: "question", "answer", "metadata". `pattern` finds the answer in the completion.
    Raises ConfigError at the start if reasoning-gym is not installed or does not know the dataset.
    """

    name = "reasoning_gym"
    bounds = (0.0, 1.0)

    def __init__(self, dataset: str = "", pattern: str | None = None) -> None:
        try:  # another release may score otherwise, so it is part of the version that the ensemble's digest holds
            self.version = f"1+{importlib.metadata.version('reasoning-gym')}"
        except ImportError as error:
            raise ConfigError("rater reasoning_gym: pip install 'lachesis-rl[reasoning-gym]'.") from error
        self.dataset = dataset
        self.pattern = pattern
        if dataset:
            try:
                _scorer(dataset)
            except ValueError as error:
                raise ConfigError(f"rater reasoning_gym: {error}.") from error

    def rate(self, sample: Sample) -> float | None:
        """Return the dataset's own score, in [0, 1]. Raises DataError if the task does not name its dataset."""
        metadata = sample.task.get("metadata") or {}
        name = self.dataset or metadata.get("source_dataset")
        if not name:
            raise DataError(f"item {sample.item}: task.metadata.source_dataset is missing; set params.dataset.")
        entry = {"question": sample.prompt, **sample.task}
        answer = given(sample, self.pattern)
        return 0.0 if answer is None else float(_scorer(name)(answer, entry))


@lru_cache(maxsize=128)
def _scorer(name: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    scorer: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(name)
    return scorer
