"""Provides the inference of a step episode: a generation request waits for the caller's action.

Only this file guarantees that a rollout requests one answer at a time, and gets exactly the tokens of the action.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.inference import InferenceRequests
from lachesis.pipeline.inference.client import GeneratedSample
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.errors import DataError

__all__ = ["INHERITED", "Detokenize", "InjectedActions", "Tokenize", "refuse_running_loop"]

_NO_TIMEOUT_S = 1e9
"""The caller's engine may take as long as it likes between two steps."""
INHERITED: list[Any] = []
"""Event loops and processes of the parent process. To close one here would unregister the parent's file descriptors
too, or kill its process."""


class Tokenize(Protocol):
    """Turns chat messages into token ids under the engine's chat template, as `InferenceClient.tokenize` does."""

    async def __call__(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids."""
        ...


class Detokenize(Protocol):
    """Turns token ids into text, as `InferenceClient.detokenize` does."""

    async def __call__(self, token_ids: Sequence[int]) -> str:
        """Return the text."""
        ...


class InjectedActions:
    """The inference of one episode. `sampling`: the parameters in the rollout's open request."""

    def __init__(self, tokenize: Tokenize) -> None:
        self.prompt_ids: list[int] = []
        self.sampling = SamplingParams()
        self.asked = asyncio.Event()
        self._tokenize = tokenize
        self._answer: asyncio.Future[GeneratedSample] | None = None

    def requests(self) -> InferenceRequests:
        """Return the interface for rollouts. It waits without a limit and never repeats a request."""
        return InferenceRequests(self, CollectConfig(request_timeout_s=_NO_TIMEOUT_S, attempts=1))

    def answer(self, action: GeneratedSample) -> None:
        """Let the rollout go on with `action` as soon as the loop runs."""
        assert self._answer is not None  # noqa: S101 - a boundary was reached
        self.asked.clear()
        self._answer.set_result(action)

    async def tokenize(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **given: Any
    ) -> list[int]:
        return await self._tokenize(messages, add_generation_prompt=add_generation_prompt, **given)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        raise DataError("an episode of steps never continues an aborted sample")

    async def generate(
        self, prompt_ids: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        if self.asked.is_set() or n != 1:
            raise DataError("the rollout asked for several answers at once; an episode of steps has one at a time")
        self.prompt_ids = list(prompt_ids)
        self.sampling = sampling or SamplingParams()
        self._answer = asyncio.get_running_loop().create_future()
        self.asked.set()
        return [await self._answer]


def refuse_running_loop() -> None:
    """Raise RuntimeError in a thread whose event loop is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "a step environment was called in a thread whose event loop is running: call it in another thread, "
        "await asyncio.to_thread(env.step, action) say"
    )
