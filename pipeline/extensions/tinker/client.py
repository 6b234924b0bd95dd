"""Wraps the SDK's client: awaitable calls, and the package's own errors.

Guarantees that a step is requested once: the SDK numbers its requests, and a server takes none of them twice. A batch
that Tinker refuses for its content and an unavailable Tinker raise different errors.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import tinker
from tinker._client import AsyncTinker  # the only one that gives up: those that `tinker` offers try for ever
from tinker.lib.retryable_exception import RetryableException

from lachesis.pipeline.errors import AccessError, InfrastructureError
from lachesis.pipeline.extensions.tinker.config import TinkerConfig
from lachesis.pipeline.extensions.tinker.key import KEY_VARIABLE, read_key
from lachesis.pipeline.trainer.backend import BatchRefusedError
from lachesis.schemas.errors import LachesisError

__all__ = ["TinkerClient", "TinkerTrainer", "is_refusal", "open_client", "own_errors", "trainable_models"]

T = TypeVar("T")
_FAREWELL_S = 5.0
"""Seconds in which a session is finished; Tinker ends it itself where that fails."""


_REFUSALS = frozenset({400, 413, 422})
"""HTTP statuses by which a request is refused for what it holds."""


@contextmanager
def own_errors(what: str) -> Iterator[None]:
    """Raise what the SDK raises as `AccessError` or `InfrastructureError`."""
    try:
        yield
    except LachesisError:
        raise
    except (tinker.AuthenticationError, tinker.PermissionDeniedError) as error:
        raise AccessError(f"Tinker refused to {what}: {error}; check the key in {KEY_VARIABLE}") from error
    # beside its own errors the SDK raises ValueError for an answer, and RuntimeError for a client after a failure
    except (tinker.TinkerError, RetryableException, ValueError, RuntimeError, TimeoutError) as error:
        raise InfrastructureError(f"Tinker did not {what}: {type(error).__name__}: {error}") from error


@asynccontextmanager
async def open_client(settings: TinkerConfig, run: str) -> AsyncIterator[TinkerClient]:
    """Yield a client with a session of its own. Raises `StartupError` without a key."""
    key = read_key(os.environ)
    named: dict[str, Any] = {"user_metadata": {"run": run}, "display_name": run, "base_url": settings.url}
    # in a thread: it returns once Tinker answers
    service = await anyio.to_thread.run_sync(lambda: tinker.ServiceClient(**named, api_key=key), abandon_on_cancel=True)
    status: Any = "errored"
    try:
        yield TinkerClient(service)
        status = "success"
    finally:
        with anyio.move_on_after(_FAREWELL_S, shield=True), suppress(InfrastructureError, AccessError):
            await _call("finish the session", lambda: service.close(status))


async def trainable_models(settings: TinkerConfig, timeout_s: float) -> list[str]:
    """Return the models that the holder of the key may train, by name.

    Raises `StartupError` without a key, `AccessError` where Tinker refuses it, and `InfrastructureError` where it does
    not answer in time.
    """
    client = AsyncTinker(
        api_key=read_key(os.environ),
        base_url=settings.url,
        timeout=timeout_s,
        max_retries=0,
        _strict_response_validation=True,
    )
    with own_errors("list its models"):
        async with client:
            with anyio.fail_after(timeout_s):
                found = await client.service.get_server_capabilities()
    return [one.model_name for one in found.supported_models if one.model_name and one.trainable is not False]


class TinkerClient:
    """Requests to Tinker other than training."""

    def __init__(self, service: tinker.ServiceClient) -> None:
        self._service = service

    async def start(self, base_model: str, rank: int) -> TinkerTrainer:
        """Return new adapters of a model."""
        create = lambda: self._service.create_lora_training_client(base_model=base_model, rank=rank)  # noqa: E731
        return TinkerTrainer(await _call(f"make adapters of {base_model}", create))

    async def resume(self, path: str) -> TinkerTrainer:
        """Return the adapters saved at `path`, and their optimizer's state."""
        create = lambda: self._service.create_training_client_from_state_with_optimizer(path)  # noqa: E731
        return TinkerTrainer(await _call(f"load {path}", create))

    async def sampler(self, path: str) -> tinker.SamplingClient:
        """Return a sampler with the weights at `path`."""
        return await _call(f"sample with {path}", lambda: self._service.create_sampling_client(model_path=path))

    async def delete(self, path: str) -> None:
        """Delete a saved state; one that is gone already is no error."""
        rest = tinker.RestClient(self._service.holder)
        with own_errors(f"delete {path}"), suppress(tinker.NotFoundError):
            await (await anyio.to_thread.run_sync(rest.delete_checkpoint_from_tinker_path, path))


class TinkerTrainer:
    """Adapters in training."""

    def __init__(self, training: tinker.TrainingClient) -> None:
        self._training = training

    async def step(
        self, data: Sequence[tinker.Datum], adam: tinker.AdamParams
    ) -> tuple[tinker.ForwardBackwardOutput, tinker.OptimStepResponse]:
        """Take one optimizer step. Both requests are sent before the answer to the first.

        Raises `BatchRefusedError` where Tinker refuses the data; whether the step was taken is not known then.
        """

        def send() -> tuple[Any, Any]:
            return self._training.forward_backward(list(data), "importance_sampling"), self._training.optim_step(adam)

        with own_errors("take a step"):
            forward, optimizer = await anyio.to_thread.run_sync(send)
            try:
                trained = await forward
            except (tinker.RequestFailedError, tinker.APIStatusError) as error:
                if is_refusal(error):
                    raise BatchRefusedError(f"Tinker refused the batch: {error}") from error
                raise
            return trained, await optimizer

    async def save(self, name: str) -> str:
        """Save weights and optimizer under a name, and return their path."""
        saved = await _call(f"save {name}", lambda: self._training.save_state(name, overwrite=True))
        return str(saved.path)

    async def save_for_sampler(self, name: str, ttl_s: int) -> str:
        """Save the weights for samplers, and return their path."""
        save = lambda: self._training.save_weights_for_sampler(name, ttl_seconds=ttl_s)  # noqa: E731
        return str((await _call(f"save {name} for samplers", save)).path)


def is_refusal(error: tinker.RequestFailedError | tinker.APIStatusError) -> bool:
    """Return whether Tinker refuses a request for what it holds."""
    if isinstance(error, tinker.RequestFailedError):
        return error.category is tinker.types.RequestErrorCategory.User
    return error.status_code in _REFUSALS


async def _call(what: str, ask: Callable[[], Awaitable[T]]) -> T:
    """Send a request in a thread, since the SDK blocks while it makes its session, and await the answer."""
    with own_errors(what):
        return await (await anyio.to_thread.run_sync(ask, abandon_on_cancel=True))
