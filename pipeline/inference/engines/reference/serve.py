"""Serves a role of the run by the reference server, in the service's own process."""

import logging
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from lachesis.pipeline.inference.directory import control_token
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.engines.reference.placement import forms_of, place
from lachesis.pipeline.inference.http_service import allowed_hosts, serve_role
from lachesis.pipeline.inference.settings import ServerSettings
from lachesis.pipeline.model.end_tokens import end_tokens
from lachesis.pipeline.model.policy import ModelSetup, PolicyModel, load_model
from lachesis.pipeline.model.shared_memory import segment_pointer
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.runtime.http import listen
from lachesis.pipeline.runtime.service import Service

__all__ = ["serve_reference"]

log = logging.getLogger("lachesis")


async def serve_reference(service: Service, settings: ServerSettings, model: str) -> None:
    """Serve a role by the reference server, in this process, until the service drains."""
    role, config = settings.role, settings.config
    pointer = segment_pointer(settings.folder / "weights") if settings.shares_weights else None
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
            pointer=pointer,
        )


def _setup(settings: ServerSettings) -> ModelSetup:
    return ModelSetup(
        tokenizer=settings.own_tokenizer,
        chat_template=settings.chat_template,
        exceptions=tuple(settings.model_exceptions),
    )
