"""Rates an answer by a reward model behind vLLM's pooling or classification endpoint."""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import httpx

from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.errors import UnreadableAnswerError
from lachesis.pipeline.scorer.rater import Rater, Sample
from lachesis.pipeline.scorer.rater_client import check_rater_url, open_client, post_json

__all__ = ["RewardModel"]


class RewardModel(Rater):
    """`route` "pooling": the score of the last token, on a scale that only the model knows: set the rater's `bounds`.
    "classify": the probability of class `label`, 0 to 1.
    """

    name = "reward_model"

    def __init__(
        self, *, url: str, model: str, route: Literal["pooling", "classify"] = "pooling", label: int = 1
    ) -> None:
        check_rater_url(url, "reward_model")
        self._url = f"{url.rstrip('/')}/{route}"
        self._model = model
        self._route = route
        self._label = label
        self.bounds = (0.0, 1.0) if route == "classify" else None

    @cached_property
    def _client(self) -> httpx.AsyncClient:  # open as long as the process
        return open_client(self._url)

    async def rate(self, sample: Sample) -> float | None:
        """Return the model's score of the conversation."""
        messages = [{"role": message["role"], "content": message["content"]} for message in sample.messages]
        answer = await post_json(self._client, self._url, {"model": self._model, "messages": messages})
        try:
            first = answer["data"][0]
            value = first["probs"][self._label] if self._route == "classify" else _last(first["data"])
        except (KeyError, IndexError, TypeError) as error:
            said = f"{without_secrets(self._url)} answered without a score: {str(answer)[:100]}"
            raise UnreadableAnswerError(said) from error
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnreadableAnswerError(f"{without_secrets(self._url)} answered {value!r:.100} where a score belongs")
        return float(value)


def _last(data: object) -> object:
    """Return the last number of a list, or of the last list of a list of lists."""
    while isinstance(data, Sequence) and not isinstance(data, str):
        data = data[-1]
    return data
