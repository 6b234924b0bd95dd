"""Runs a local model on the reference engine in this process: for a client, or to be served."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

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
        from lachesis.pipeline.inference.engines.reference.preparation import prepare_engine
        from lachesis.pipeline.model.policy import ModelSetup
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lachesis"):
            raise
        raise StartupError(f"a local model needs the package {error.name!r}: {install_command('train')}") from error

    setup = ModelSetup(chat_template=settings.chat_template, exceptions=tuple(exceptions))
    prepared = await prepare_engine(model, setup, settings, role="policy", lineage="test")
    with TemporaryDirectory() as weights, prepared.engine as engine:
        yield build_app(
            prepared.policy,
            engine,
            model_name=name or model,
            weights_folder=Path(weights),
            token=token,
            key=key,
            hosts=hosts,
            aliases=aliases,
            forms=prepared.forms,
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
