"""Serves a role of the run by the reference server, in the service's own process."""

import logging
from pathlib import Path

from lachesis.pipeline.inference.directory import control_token
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.preparation import prepare_engine
from lachesis.pipeline.inference.http_service import allowed_hosts, serve_role
from lachesis.pipeline.inference.settings import ServerSettings
from lachesis.pipeline.model.policy import ModelSetup
from lachesis.pipeline.model.shared_memory import segment_pointer
from lachesis.pipeline.runtime.http import listen
from lachesis.pipeline.runtime.service import Service

__all__ = ["serve_reference"]

log = logging.getLogger("lachesis")


async def serve_reference(service: Service, settings: ServerSettings, model: str) -> None:
    """Serve a role by the reference server, in this process, until the service drains."""
    role, config = settings.role, settings.config
    pointer = segment_pointer(settings.folder / "weights") if settings.shares_weights else None
    prepared = await prepare_engine(model, _setup(settings), config, role=role, lineage=role)
    log.info("%s computes on %s in %s", model, prepared.device, config.dtype)
    with listen(config.host, config.port, "inference.<role>.port") as listener, prepared.engine as engine:
        app = build_app(
            prepared.policy,
            engine,
            model_name=role,
            weights_folder=settings.folder / "weights",
            token=control_token(settings.folder, role),
            key=settings.access.key(),
            hosts=allowed_hosts(settings, listener),
            aliases=["default", model, Path(model).name],
            forms=prepared.forms,
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
