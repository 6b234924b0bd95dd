"""Runs a local model on the reference engine in this process: for a client, or to be served."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import anyio.to_thread
import httpx

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.config.run import InferenceConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from starlette.applications import Starlette

__all__ = ["open_app", "open_local_model"]


@asynccontextmanager
async def open_app(
    model: str,
    settings: InferenceConfig,
    *,
    name: str | None = None,
    aliases: "Sequence[str]" = (),
    token: str | None = None,
    key: str | None = None,
    hosts: "Container[str] | None" = None,
    exceptions: "Sequence[str]" = (),
) -> "AsyncIterator[Starlette]":
    """Load `model`, a folder or a Hugging Face id, and yield the inference server's application over it.

    `settings`: its threads, engine and chat template. `name`: what it is called, by default `model`. `exceptions`: see
    `model_exceptions`. The others: as `build_app`.
    Raises ConfigError when it cannot be loaded, StartupError when a package is missing.
    """
    try:
        from lachesis.pipeline.inference.engines.reference.app import build_app
        from lachesis.pipeline.inference.engines.reference.engine import Engine
        from lachesis.pipeline.inference.engines.reference.placement import forms_of, place
        from lachesis.pipeline.model.end_tokens import end_tokens
        from lachesis.pipeline.model.policy import ModelSetup, load_model
        from lachesis.pipeline.model.tensors import policy_tensors, policy_version
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lachesis"):
            raise
        raise StartupError(f"a local model needs the package {error.name!r}: {install_command('train')}") from error

    setup = ModelSetup(chat_template=settings.chat_template, exceptions=tuple(exceptions))
    policy = await anyio.to_thread.run_sync(partial(load_model, model, setup))
    version = await anyio.to_thread.run_sync(lambda: policy_version(0, "test", policy_tensors(policy.model)))
    forms = forms_of(policy.model)
    await anyio.to_thread.run_sync(partial(place, policy, settings, "policy"))
    making = partial(
        Engine,
        policy.model,
        eos_token_id=end_tokens(policy.model, policy.tokenizer),
        weight_version=str(version),
        config=settings.engine,
        decode=policy.tokenizer.decode,
    )
    prepared = await anyio.to_thread.run_sync(making)
    with TemporaryDirectory() as weights, prepared as engine:
        yield build_app(
            policy,
            engine,
            model_name=name or model,
            weights_folder=Path(weights),
            token=token,
            key=key,
            hosts=hosts,
            aliases=aliases,
            forms=forms,
        )


@asynccontextmanager
async def open_local_model(
    model: str, timeout_s: float, settings: InferenceConfig | None = None, *, exceptions: "Sequence[str]" = ()
) -> AsyncIterator[InferenceClient]:
    """Load `model`, a folder or a Hugging Face id, and yield a client for it.

    `exceptions`: see `model_exceptions`. Raises ConfigError when it cannot be loaded.
    """
    async with open_app(model, settings or InferenceConfig(), exceptions=exceptions) as app:
        config = ClientConfig(url="http://127.0.0.1", timeout=timeout_s)
        async with InferenceClient(config, transport=httpx.ASGITransport(app)) as client:
            yield client
