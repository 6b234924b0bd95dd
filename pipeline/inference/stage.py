"""An inference server as a service: the reference server, or vLLM as a child.

It registers its URL and follows the policy.

The policy's server registers only once it holds a published policy version, so no rollout comes from unnamed weights.
"""

import logging
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from lachesis.pipeline.bus.background import background
from lachesis.pipeline.extension import load_place
from lachesis.pipeline.inference.directory import (
    InferenceDirectory,
    control_token,
)
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.engines.reference.placement import forms_of, place
from lachesis.pipeline.inference.engines.vllm.process import start_vllm
from lachesis.pipeline.inference.http_service import allowed_hosts, announce, serve_role
from lachesis.pipeline.inference.settings import ServerSettings
from lachesis.pipeline.model.end_tokens import end_tokens
from lachesis.pipeline.model.policy import ModelSetup, PolicyModel, load_model
from lachesis.pipeline.model.pretrained_tokenizer import load_tokenizer
from lachesis.pipeline.model.shared_memory import segment_pointer
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.model.tokenizer import tokenizer_hash
from lachesis.pipeline.runtime.http import listen
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas.errors import ConfigError

__all__ = ["run_inference", "serve_reference", "serve_vllm"]

log = logging.getLogger("lachesis")


async def run_inference(service: Service, settings: ServerSettings) -> None:
    """Serve a role (policy, teacher, teacher-NAME or eval) until the service drains."""
    model, role = settings.model, settings.role
    if model is None:
        raise ConfigError(f"inference.{role}.model: not set, and neither is model; name a local folder or a model id")
    await service.starts_with(f"loading model {model}")
    await load_place(settings.config.spec.serve)(service, settings, model)


def _setup(settings: ServerSettings) -> ModelSetup:
    return ModelSetup(
        tokenizer=settings.own_tokenizer,
        chat_template=settings.chat_template,
        exceptions=tuple(settings.model_exceptions),
    )


def _pointer(settings: ServerSettings) -> Path | None:
    """Return the pointer to the trainer's weights where they are in shared memory, else None."""
    return segment_pointer(settings.folder / "weights") if settings.shares_weights else None


async def serve_vllm(service: Service, settings: ServerSettings, model: str) -> None:
    """Serve a role by vLLM, as a child process, until the service drains."""
    role, tokenizer = settings.role, settings.tokenizer or model
    found = await anyio.to_thread.run_sync(partial(load_tokenizer, tokenizer, settings.chat_template))
    async with (
        start_vllm(
            settings.config,
            model,
            role=role,
            folder=settings.folder,
            tokenizer_hash=tokenizer_hash(found),
            token=control_token(settings.folder, role),
            key=settings.access.key(),
            tokenizer=settings.own_tokenizer,
            chat_template=found.chat_template if settings.chat_template else None,
            routed_experts=settings.routed_experts,
        ) as server,
        InferenceDirectory(timeout_s=120.0) as own,
        service.until_drained(),
    ):
        await service.starts_with(f"starting vLLM with model {model}")
        await server.ready()
        await own.use(server.url, server.token)
        async with background() as tasks:
            tasks.start_soon(server.watch)
            url = settings.config.advertise or server.url
            await announce(service, settings, own, url, pointer=_pointer(settings))


async def serve_reference(service: Service, settings: ServerSettings, model: str) -> None:
    """Serve a role by the reference server, in this process, until the service drains."""
    role, config = settings.role, settings.config
    policy: PolicyModel = await anyio.to_thread.run_sync(partial(load_model, model, _setup(settings)))
    version = await anyio.to_thread.run_sync(lambda: policy_version(0, role, policy_tensors(policy.model)))
    forms = forms_of(policy.model)
    device = await anyio.to_thread.run_sync(partial(place, policy, config, role))
    log.info("%s computes on %s in %s", model, device, config.dtype)
    making = partial(
        Engine,
        policy.model,
        eos_token_id=end_tokens(policy.model, policy.tokenizer),
        weight_version=str(version),
        config=config.engine,
        decode=policy.tokenizer.decode,
    )
    prepared = await anyio.to_thread.run_sync(making)
    with listen(config.host, config.port, "inference.<role>.port") as listener, prepared as engine:
        app = build_app(
            policy,
            engine,
            model_name=role,
            weights_folder=settings.folder / "weights",
            token=control_token(settings.folder, role),
            key=settings.access.key(),
            hosts=allowed_hosts(settings, listener),
            aliases=["default", model, Path(model).name],
            forms=forms,
        )
        await serve_role(
            service,
            settings,
            app,
            listener,
            load=lambda: (engine.running, engine.waiting),
            check_alive=engine.check_alive,
            pointer=_pointer(settings),
        )
