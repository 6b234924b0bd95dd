"""Provides the inference of a step episode: a generation request waits for the caller's action.

Only this file guarantees that a rollout requests one answer at a time, and gets exactly the tokens of the action.
"""

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from lachesis.pipeline.common.number_arguments import whole_number
from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.inference_requests import InferenceRequests
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.errors import ConfigError, DataError

__all__ = [
    "INHERITED",
    "NO_TIMEOUT_S",
    "Detokenize",
    "EpisodeLoop",
    "InjectedActions",
    "Tokenize",
    "episode_index",
    "of_the_engine",
    "refuse_running_loop",
]

T = TypeVar("T")

NO_TIMEOUT_S = 1e9
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


def of_the_engine(name: str, function: Callable[..., Any], *keywords: str) -> Callable[..., Any]:
    """Return `tokenize` or `detokenize` as an async function; a plain one does as well.

    Raises `ConfigError` on what cannot be called with one argument and `keywords`.
    """
    form = f"{name}({'messages, *, add_generation_prompt=True' if keywords else 'token_ids'})"
    try:
        inspect.signature(function).bind(None, **dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} is {function!r:.80}, which cannot be called as {form}: {error}. Give a function of that form, "
            "async or not"
        ) from error

    async def call(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        return await found if inspect.isawaitable(found) else found

    return call


def episode_index(seed: int | None, options: Mapping[str, Any] | None, following: int, count: int) -> int:
    """Return the task that a `reset` begins: by `options["index"]`, by `seed`, or the one that follows.

    Raises `DataError` on what is no whole number.
    """
    index = (options or {}).get("index", following if seed is None else seed)
    return whole_number("the seed of an episode", index, least=-(1 << 63)) % count


class EpisodeLoop:
    """An event loop that runs in the caller's thread and only while a caller waits for `run`.

    It outlives episodes, so that processes which an environment started in one are there in the next: anyio ends them
    with the outermost task, which is one that waits until `close`.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._outermost: asyncio.Task[bool] = self._loop.create_task(asyncio.Event().wait())
        # a forked process drops its parent's loop as it is; asyncio.gather, too, keeps it from a message so
        self._outermost._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001

    @property
    def is_inherited(self) -> bool:
        """Whether a parent process made it; it is then left alone."""
        return self._pid != os.getpid()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Return the task of some work, which goes on while the loop runs."""
        return self._loop.create_task(work)

    def run(self, work: Awaitable[T]) -> T:
        """Return the result of some work. Raises what it raises."""
        task = asyncio.ensure_future(work, loop=self._loop)
        task.add_done_callback(lambda _: self._loop.stop())
        try:
            self._loop.run_until_complete(self._outermost)
        except RuntimeError:  # the loop was stopped, and not by the end of its outermost task
            if not task.done():
                raise
        return task.result()

    def close(self) -> None:
        """End all tasks and close the loop. It may be called again."""
        if self.is_inherited:
            INHERITED.append(self)
        elif not self._loop.is_closed():
            try:
                refuse_running_loop()
                left = asyncio.all_tasks(self._loop)
                for task in left:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(left))
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            except RuntimeError:  # collected as garbage while another loop runs in this thread
                pass
            finally:
                self._loop.close()


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
        return InferenceRequests(self, CollectConfig(request_timeout_s=NO_TIMEOUT_S, attempts=1))

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
            raise DataError("the rollout requested several answers at once; an episode of steps has one at a time")
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
