"""Requests verdicts of a language model that judges, over any OpenAI-compatible endpoint.

Answers are data to the judge. Each stands between marks that are drawn for each request, so that it cannot close them
and address the judge. A verdict is read only from the judge's own reply, behind its thinking.
"""

import secrets
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import httpx
import msgspec

from lachesis.pipeline.common.secrets import key_in_variable, without_secrets
from lachesis.pipeline.errors import UnreadableAnswerError
from lachesis.pipeline.scorer.answers.given_and_reference import references
from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.scorer.rater_client import check_rater_url, open_client, post_json
from lachesis.pipeline.tasks.thoughts import answer_part
from lachesis.schemas.errors import ConfigError

__all__ = ["JudgeClient", "UnreadableVerdictError", "between_marks", "describe_task", "draw_mark"]


Verdict = TypeVar("Verdict")


class UnreadableVerdictError(Exception):
    """Raised when none of a judge's replies holds a verdict."""


class JudgeClient:
    """Talks to one judge for the rater `rater`.

    `key_env` names the environment variable that holds the key; up to `attempts` replies are requested until one has a
    verdict. Raises `ConfigError` if the settings cannot be.
    """

    def __init__(
        self, rater: str, *, url: str, model: str, key_env: str | None, max_tokens: int, attempts: int
    ) -> None:
        check_rater_url(url, rater)
        try:
            self._key = None if key_env is None else key_in_variable(key_env)
        except ConfigError as error:
            raise ConfigError(f"rater {rater}: {error}") from error
        if attempts < 1:
            raise ConfigError(f"rater {rater}: attempts is {attempts}; it must be at least 1.")
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._max_tokens = max_tokens
        self._attempts = attempts

    @cached_property
    def _client(self) -> httpx.AsyncClient:  # open as long as the process
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        return open_client(self._url, headers)

    async def request_verdict(self, system: str, user: str, read: Callable[[str], Verdict | None]) -> Verdict:
        """Return what `read` finds in a reply. Raises `UnreadableVerdictError` when it finds nothing in any."""
        body = {
            "model": self._model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
            "temperature": 0.0,
            "max_tokens": self._max_tokens,
        }
        reply = ""
        for _ in range(self._attempts):
            reply = _content(self._url, await post_json(self._client, self._url, body))
            verdict = read(answer_part(reply))
            if verdict is not None:
                return verdict
        raise UnreadableVerdictError(f"{self._attempts} replies without a verdict, the last: {reply[-200:]!r}")


def draw_mark(name: str = "answer") -> str:
    """Return a mark that no answer can know."""
    return f"{name}-{secrets.token_hex(8)}"


def between_marks(mark: str, text: str) -> str:
    """Return a text as the judge sees it, between its marks."""
    return f"<{mark}>\n{text}\n</{mark}>"


def describe_task(sample: Sample) -> list[str]:
    """Return the parts of a request that say what the task is, with its reference answer where it has one."""
    parts = [f"Task:\n{sample.prompt}"]
    answer = sample.task.get("answer")
    expected = _as_json(answer) if isinstance(answer, list | dict) else next(iter(references(sample)), None)
    if expected is not None:
        parts.append(f"Reference answer:\n{expected}")
    return parts


def _as_json(answer: list[Any] | dict[str, Any]) -> str:
    """Return a reference of several values, which a model can read and other raters refuse."""
    return msgspec.json.encode(answer).decode()


def _content(url: str, answer: object) -> str:
    """Return the text of the first choice, empty where the judge has said nothing."""
    try:
        content = answer["choices"][0]["message"]["content"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError) as error:
        said = f"{without_secrets(url)} answered without a choice: {str(answer)[:100]!r}"
        raise UnreadableAnswerError(said) from error
    return content if isinstance(content, str) else ""
