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
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.extension import load_place
from lachesis.pipeline.inference.app import build_app
from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.inference.directory import (
    InferenceDirectory,
    control_token,
    sampling_key,
)
from lachesis.pipeline.inference.engine import Engine
from lachesis.pipeline.inference.http_service import allowed_hosts, announce, serve_role
from lachesis.pipeline.inference.placement import forms_of, place
from lachesis.pipeline.inference.vllm import start_vllm
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


async def run_inference(service: Service, config: RunConfig, role: str) -> None:
    """Serve `role` (policy, teacher, teacher-NAME or eval) until the service drains."""
    settings = config.role(role)
    model = settings.model or config.model
    if model is None:
        raise ConfigError(f"inference.{role}.model: not set, and neither is model; name a local folder or a model id")
    await service.starts_with(f"loading model {model}")
    await load_place(settings.spec.serve)(service, config, role, settings, model)


def _own_tokenizer(config: RunConfig, role: str) -> str | None:
    """Return the tokenizer that a server is to have in place of the one beside its weights; None: that one."""
    settings = config.role(role)
    return settings.tokenizer if settings.tokenizer or settings.model else config.tokenizer


def _setup(config: RunConfig, role: str) -> ModelSetup:
    return ModelSetup(
        tokenizer=_own_tokenizer(config, role),
        chat_template=config.chat_template_of(role),
        exceptions=tuple(config.model_exceptions),
    )


def _pointer(config: RunConfig) -> Path | None:
    """Return the pointer to the trainer's weights where they are in shared memory, else None."""
    shared = config.weights.transport == "shared_memory"
    return segment_pointer(config.path / "weights") if shared else None


async def serve_vllm(service: Service, config: RunConfig, role: str, settings: InferenceConfig, model: str) -> None:
    """Serve a role by vLLM, as a child process, until the service drains."""
    found = await anyio.to_thread.run_sync(
        partial(load_tokenizer, config.tokenizer_of(role) or model, config.chat_template_of(role))
    )
    async with (
        start_vllm(
            settings,
            model,
            role=role,
            folder=config.path,
            tokenizer_hash=tokenizer_hash(found),
            token=control_token(config.path, role),
            key=sampling_key(config, role),
            tokenizer=_own_tokenizer(config, role),
            chat_template=found.chat_template if config.chat_template_of(role) else None,
            routed_experts=role == "policy" and "routed_experts" in config.training.reads.columns,
        ) as server,
        InferenceDirectory(timeout_s=120.0) as own,
        service.until_drained(),
    ):
        await service.starts_with(f"starting vLLM with model {model}")
        await server.ready()
        await own.use(server.url, server.token)
        async with background() as tasks:
            tasks.start_soon(server.watch)
            url = settings.advertise or server.url
            await announce(service, config, role, own, url, pointer=_pointer(config))


async def serve_reference(
    service: Service, config: RunConfig, role: str, settings: InferenceConfig, model: str
) -> None:
    """Serve a role by the reference server, in this process, until the service drains."""
    policy: PolicyModel = await anyio.to_thread.run_sync(partial(load_model, model, _setup(config, role)))
    version = await anyio.to_thread.run_sync(lambda: policy_version(0, role, policy_tensors(policy.model)))
    forms = forms_of(policy.model)
    device = await anyio.to_thread.run_sync(partial(place, policy, settings, role))
    log.info("%s computes on %s in %s", model, device, settings.dtype)
    making = partial(
        Engine,
        policy.model,
        eos_token_id=end_tokens(policy.model, policy.tokenizer),
        weight_version=str(version),
        config=settings.engine,
        decode=policy.tokenizer.decode,
    )
    prepared = await anyio.to_thread.run_sync(making)
    with listen(settings.host, settings.port, "inference.<role>.port") as listener, prepared as engine:
        app = build_app(
            policy,
            engine,
            model_name=role,
            weights_folder=config.path / "weights",
            token=control_token(config.path, role),
            key=sampling_key(config, role),
            hosts=allowed_hosts(config, role, listener),
            aliases=["default", model, Path(model).name],
            forms=forms,
        )
        await serve_role(
            service,
            config,
            role,
            app,
            listener,
            load=lambda: (engine.running, engine.waiting),
            check_alive=engine.check_alive,
            pointer=_pointer(config),
        )
