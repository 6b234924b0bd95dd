"""The inference server of a policy at Tinker as a service."""

from __future__ import annotations

import os
from functools import partial

import anyio.to_thread

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.servers import server_settings
from lachesis.pipeline.extensions.tinker.config import settings_of
from lachesis.pipeline.extensions.tinker.key import read_key
from lachesis.pipeline.extensions.tinker.names import base_model_of, tokenizer_of
from lachesis.pipeline.extensions.tinker.sampler import open_sampler
from lachesis.pipeline.inference.directory import control_token
from lachesis.pipeline.inference.http_service import allowed_hosts, serve_role
from lachesis.pipeline.inference.serving.app import ServedTokens, serving_app
from lachesis.pipeline.model.end_tokens import named_end_tokens
from lachesis.pipeline.model.pretrained_tokenizer import load_tokenizer
from lachesis.pipeline.model.tokenizer import tokenizer_hash
from lachesis.pipeline.runtime.http import listen
from lachesis.pipeline.runtime.service import Service

__all__ = ["run_tinker_inference"]


async def run_tinker_inference(service: Service, config: RunConfig, role: str) -> None:
    """Serve `role` (policy or eval) until the service drains."""
    read_key(os.environ)  # before anything is waited for
    base_model = base_model_of(config)
    await service.starts_with(f"loading the tokenizer of {base_model}")
    tokenizer = await anyio.to_thread.run_sync(partial(load_tokenizer, tokenizer_of(config), config.chat_template))
    ends = await anyio.to_thread.run_sync(partial(named_end_tokens, tokenizer_of(config), tokenizer))
    server = server_settings(config, role)
    port = server.config.port or (settings_of(config).port if role == "policy" else 0)
    with listen(server.config.host, port, "training.tinker.port") as listener:
        async with open_sampler(settings_of(config), config.run, tokenizer, ends) as sampler:
            app = serving_app(
                ServedTokens(tokenizer, tokenizer_hash(tokenizer), len(tokenizer), ends),
                sampler,
                model_name=role,
                read_weights=sampler.read_weights,
                token=control_token(config.path, role),
                key=server.access.key(),
                hosts=allowed_hosts(server, listener),
                aliases=["default", base_model],
            )
            await serve_role(
                service, server, app, listener, load=lambda: (sampler.running, 0), check_alive=sampler.check_alive
            )
