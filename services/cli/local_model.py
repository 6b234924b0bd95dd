"""Serves a local model inside this process: the reference engine behind the client, without a port."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio.to_thread
import httpx

from lachesis.pipeline.config.run import InferenceConfig
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig, EngineConfig

__all__ = ["open_local_model"]


@asynccontextmanager
async def open_local_model(model: str, timeout_s: float) -> AsyncIterator[InferenceClient]:
    """Load `model`, a folder or a Hugging Face id, and yield a client for it.

    Raises ConfigError when it cannot be loaded.
    """
    import torch

    from lachesis.pipeline.inference.app import build_app
    from lachesis.pipeline.inference.engine import Engine
    from lachesis.pipeline.model.policy import load_model
    from lachesis.pipeline.model.tensors import policy_tensors, policy_version

    torch.set_num_threads(InferenceConfig().threads)
    policy = await anyio.to_thread.run_sync(partial(load_model, model))
    version = str(policy_version(0, "test", policy_tensors(policy.model)))
    with (
        TemporaryDirectory() as weights,
        Engine(
            policy.model,
            eos_token_id=policy.tokenizer.eos_token_id,
            weight_version=version,
            config=EngineConfig(),
            decode=partial(policy.tokenizer.decode, skip_special_tokens=True),
        ) as engine,
    ):
        app = build_app(policy, engine, model_name=model, weights_folder=Path(weights))
        config = ClientConfig(url="http://127.0.0.1", timeout=timeout_s)
        async with InferenceClient(config, transport=httpx.ASGITransport(app)) as client:
            yield client
