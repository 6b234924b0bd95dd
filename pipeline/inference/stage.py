"""Serves a role of the run by the engine that `inference.ROLE.kind` names, as a service."""

from lachesis.pipeline.extension import load_place
from lachesis.pipeline.inference.settings import ServerSettings
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas.errors import ConfigError

__all__ = ["run_inference"]


async def run_inference(service: Service, settings: ServerSettings) -> None:
    """Serve a role (policy, teacher, teacher-NAME or eval) until the service drains."""
    model, role = settings.model, settings.role
    if model is None:
        raise ConfigError(f"inference.{role}.model: not set, and neither is model; name a local folder or a model id")
    await service.starts_with(f"loading model {model}")
    await load_place(settings.config.spec.serve)(service, settings, model)
