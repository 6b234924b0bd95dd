"""Says whether a run has a gateway, and how environments reach it."""

import shlex
from collections.abc import Iterator

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.extensions.atropos.gateway.config import settings_of
from lachesis.pipeline.extensions.atropos.gateway.token import GATEWAY_URL

__all__ = ["announce", "gateway_processes"]


def gateway_processes(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the gateway where an environment's kind is gateway."""
    if any(env.kind == "gateway" for env in config.environments.values()):
        yield "gateway", ""


def announce(config: RunConfig) -> list[str]:
    """Return how environments of other projects reach the run, if it has any."""
    names = ", ".join(name for name, env in config.environments.items() if env.kind == "gateway")
    if not names:
        return []
    settings = settings_of(config)
    if not settings.needs_token:
        return [f"environments reach the gateway at http://{settings.host}:{settings.port}: {names}"]
    url = shlex.quote(str(config.path / GATEWAY_URL))
    return [f'environments reach the gateway by the URL in {url} (--env.rollout_server_url "$(cat {url})"): {names}']
