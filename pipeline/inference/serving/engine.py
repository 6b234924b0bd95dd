"""The interface behind the HTTP routes: implemented by the engine here, or by a service elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.inference.prompt_tree import PromptPath
from lachesis.pipeline.inference.protocol import PauseMode, SamplingParams
from lachesis.pipeline.inference.serving.results import GenerationResult, TokenListener

__all__ = ["EngineFullError", "SamplingEngine"]


class EngineFullError(InfrastructureError):
    """Raised when the engine's queue is at its bound; try again a little later."""


class SamplingEngine(Protocol):
    """Samples from weights that have a version, and can be paused."""

    max_model_len: int
    scores_branches: bool
    """Whether `submit` takes branches."""

    @property
    def weight_version(self) -> str:
        """Name of the weights that sample the next token."""

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds."""

    def check_alive(self) -> None:
        """Raise InfrastructureError when it does not run."""

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        listener: TokenListener | None = None,
        branches: Sequence[PromptPath] = (),
    ) -> Future[GenerationResult]:
        """Queue a request. Cancel the future to drop its work. `listener` is called with each token.

        `branches`: paths that have their logprobs computed with those of the prompt, after which they come.

        Raises DataError when it can never be served, EngineFullError when the queue is full, InfrastructureError when
        it does not run.
        """

    def pause(self, mode: PauseMode) -> Future[None]:
        """Start nothing new until `resume`. The future is done when the pause holds."""

    def resume(self) -> Future[None]:
        """Go on after `pause`."""

    def load_weights(self, tensors: Any, weight_version: str) -> Future[None]:
        """Sample with other weights, as read. The future raises DataError if they do not fit."""
