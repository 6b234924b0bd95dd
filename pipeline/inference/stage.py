"""An inference server as a service: the reference server, or vLLM as a child.

Register its URL, follow the policy.

The policy's server registers only once it holds a published policy version, so no rollout comes from unnamed weights.
"""

import logging
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import torch
import uvicorn

from lachesis.pipeline.bus.background import background
from lachesis.pipeline.config.run import InferenceConfig, RunConfig
from lachesis.pipeline.gateway.config import LOOPBACK
from lachesis.pipeline.inference.app import SAMPLING_PATHS, build_app
from lachesis.pipeline.inference.directory import (
    InferenceDirectory,
    control_token,
    key_path,
    register,
    sampling_key,
    stay_registered,
    url_file,
)
from lachesis.pipeline.inference.engine import Engine
from lachesis.pipeline.inference.policy_follower import follow_policy
from lachesis.pipeline.inference.traces import TracedRequests
from lachesis.pipeline.inference.vllm import start_vllm
from lachesis.pipeline.model.policy import ModelSetup, PolicyModel, load_model, load_tokenizer
from lachesis.pipeline.model.shared_memory import segment_pointer
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.model.tokenizer import tokenizer_hash
from lachesis.pipeline.private_file import write_private
from lachesis.pipeline.runtime.http import HttpServer, RequestCounter, host_of, http_within, listen
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.weights.download import WeightsReceiver
from lachesis.schemas.errors import ConfigError

__all__ = ["run_inference"]

log = logging.getLogger("lachesis")

_HEAD_S = 10.0
"""Seconds in which a request's headers must have arrived."""


async def run_inference(service: Service, config: RunConfig, role: str) -> None:
    """Serve `role` (policy, teacher, teacher-NAME or eval) until the service drains."""
    settings = config.role(role)
    model = settings.model or config.model
    if model is None:
        raise ConfigError(f"inference.{role}.model: not set, and neither is model; name a local folder or a model id")
    await service.starts_with(f"loading model {model}")
    serve = _serve_vllm if settings.kind == "vllm" else _serve_reference
    await serve(service, config, role, settings, model)


def _own_tokenizer(config: RunConfig, role: str) -> str | None:
    """Return the tokenizer that a server is to have in place of the one beside its weights; None: that one."""
    settings = config.role(role)
    return settings.tokenizer if settings.tokenizer or settings.model else config.tokenizer


async def _serve_vllm(service: Service, config: RunConfig, role: str, settings: InferenceConfig, model: str) -> None:
    found = await anyio.to_thread.run_sync(partial(load_tokenizer, config.tokenizer_of(role) or model))
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
        ) as server,
        InferenceDirectory(timeout_s=120.0) as own,
        service.until_drained(),
    ):
        await service.starts_with(f"starting vLLM with model {model}")
        await server.ready()
        await own.use(server.url, server.token)
        async with background() as tasks:
            tasks.start_soon(server.watch)
            await _announce(service, config, role, own, settings.advertise or server.url)


async def _serve_reference(
    service: Service, config: RunConfig, role: str, settings: InferenceConfig, model: str
) -> None:
    torch.set_num_threads(settings.threads)
    policy: PolicyModel = await anyio.to_thread.run_sync(
        partial(load_model, model, ModelSetup(tokenizer=_own_tokenizer(config, role)))
    )
    version = policy_version(0, role, policy_tensors(policy.model))
    with (
        listen(settings.host, settings.port, "inference.<role>.port") as listener,
        Engine(
            policy.model,
            eos_token_id=policy.tokenizer.eos_token_id,
            weight_version=str(version),
            config=settings.engine,
            decode=partial(policy.tokenizer.decode, skip_special_tokens=True),
        ) as engine,
    ):
        url = f"http://{settings.local_address}:{listener.getsockname()[1]}"
        token = control_token(config.path, role)
        hosts = {host_of(urlsplit(settings.advertise or url).netloc)} if settings.host in LOOPBACK else None
        weights = config.path / "weights"
        app = build_app(
            policy,
            engine,
            model_name=role,
            weights_folder=weights,
            token=token,
            key=sampling_key(config, role),
            hosts=hosts,
            aliases=["default", model, Path(model).name],
        )
        traced = TracedRequests(app, service, role, SAMPLING_PATHS) if service.tracing.on else app
        counted = RequestCounter(traced, service.answered, SAMPLING_PATHS)
        server = HttpServer(
            uvicorn.Config(
                counted,
                log_level="warning",
                lifespan="off",
                server_header=False,
                http=http_within(_HEAD_S),
                timeout_graceful_shutdown=5,
            )
        )
        async with InferenceDirectory(timeout_s=120.0) as own, background() as tasks:
            await own.use(url, token)
            tasks.start_soon(server.stop_on_drain, service)
            tasks.start_soon(_count, service, engine)
            tasks.start_soon(_announce, service, config, role, own, settings.advertise or url)
            await server.serve_until_cancelled([listener])


async def _announce(service: Service, config: RunConfig, role: str, own: InferenceDirectory, url: str) -> None:
    """Register the server, the policy's once it holds a published version; then keep both as they should be."""
    async with service.until_drained(), anyio.create_task_group() as tasks:
        if role == "policy":
            await service.starts_with("waiting for the trainer to publish a policy")
            loaded = anyio.Event()
            receiver = WeightsReceiver(service.bus, service.run, config.path / "weights" / role)
            shared = segment_pointer(config.path / "weights") if config.weights.transport == "shared_memory" else None
            # a trainer with shared weights waits for the server, so that it is never late
            behind = None if shared is not None else config.batching.max_staleness
            follow = partial(follow_policy, path_of=receiver.path_of, max_behind=behind, shared=shared)
            tasks.start_soon(follow, service, own, loaded, config.training.name)
            await loaded.wait()
        await service.retrying("register")(register, service.bus, service.run, role, url)
        await anyio.to_thread.run_sync(write_private, url_file(config.path, role), url)
        if (path := key_path(config, role)) is not None:
            log.info("requests for samples must bear the key that %s holds", path)
        service.mark_ok()
        await service.retrying("stay registered")(stay_registered, service.bus, service.run, role, url)


async def _count(service: Service, engine: Engine) -> None:
    while True:
        service.vitals.in_flight = engine.running
        service.vitals.lag = engine.waiting
        await anyio.sleep(1.0)
