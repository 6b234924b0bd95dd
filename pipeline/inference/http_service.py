"""Serves an application for a role of the run: registers it, updates its policy, counts. No torch."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from starlette.types import ASGIApp

from lachesis.pipeline.bus.background import background
from lachesis.pipeline.common.loopback import LOOPBACK
from lachesis.pipeline.common.private_file import write_private
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, StartupError
from lachesis.pipeline.inference.directory import (
    InferenceDirectory,
    control_token,
    key_path,
    register,
    stay_registered,
    url_file,
)
from lachesis.pipeline.inference.policy_follower import follow_policy
from lachesis.pipeline.inference.sampling_notice import SamplingNotice
from lachesis.pipeline.inference.serving_app import SAMPLING_PATHS, TEXT_PATHS
from lachesis.pipeline.inference.traces import TracedRequests
from lachesis.pipeline.runtime.http import HttpServer, RequestCounter, host_of
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.weights.download import FETCHED, WeightsReceiver

__all__ = ["allowed_hosts", "announce", "serve_role"]

log = logging.getLogger("lachesis")

_HEAD_S = 10.0
"""Seconds in which a request's headers must have arrived."""


def local_url(config: RunConfig, role: str, listener: socket.socket) -> str:
    """Return the URL by which this machine reaches the listening server."""
    return f"http://{config.role(role).local_address}:{listener.getsockname()[1]}"


def allowed_hosts(config: RunConfig, role: str, listener: socket.socket) -> set[str] | None:
    """Return the names of hosts that requests may bear; None: any (see `BrowserGuard`)."""
    settings = config.role(role)
    url = settings.advertise or local_url(config, role, listener)
    return {host_of(urlsplit(url).netloc)} if settings.host in LOOPBACK else None


async def serve_role(
    service: Service,
    config: RunConfig,
    role: str,
    app: ASGIApp,
    listener: socket.socket,
    *,
    load: Callable[[], tuple[int, int]],
    check_alive: Callable[[], None],
    pointer: Path | None = None,
) -> None:
    """Serve `app` until the service drains.

    `load`: requests in work, and waiting. `pointer`: as `announce`.

    Raises StartupError when `check_alive` raises InfrastructureError: the engine is gone, so the service ends and is
    started again, and the fault is its own.
    """
    foreign = role == "policy" and any(env.is_foreign for env in config.environments.values())
    if foreign and config.trained_temperature is not None:
        app = SamplingNotice(app, TEXT_PATHS, config.trained_temperature, partial(service.set_problem, "sampling"))
    traced = TracedRequests(app, service, role, SAMPLING_PATHS) if service.tracing.on else app
    counted = RequestCounter(traced, service.answered, SAMPLING_PATHS)
    server = HttpServer.over(counted, head_s=_HEAD_S, grace_s=5)
    url = local_url(config, role, listener)

    async def count() -> None:
        while True:
            service.vitals.in_flight, service.vitals.lag = load()
            try:
                check_alive()
            except InfrastructureError as error:
                raise StartupError(f"inference.{role}: {error}") from error
            await anyio.sleep(1.0)

    async with InferenceDirectory(timeout_s=120.0) as own, background() as tasks:
        await own.use(url, control_token(config.path, role))
        tasks.start_soon(server.stop_on_drain, service)
        tasks.start_soon(count)
        tasks.start_soon(
            partial(announce, service, config, role, own, config.role(role).advertise or url, pointer=pointer)
        )
        await server.serve_until_cancelled([listener])


async def announce(
    service: Service, config: RunConfig, role: str, own: InferenceDirectory, url: str, *, pointer: Path | None
) -> None:
    """Register the server, the policy's once it holds a published version; then keep both so.

    `pointer`: to the trainer's weights, where they are in shared memory.
    """
    async with service.until_drained(), anyio.create_task_group() as tasks:
        if role == "policy":
            await service.starts_with("waiting for the trainer to publish a policy")
            loaded = anyio.Event()
            receiver = WeightsReceiver(service.bus, service.run, config.path / "weights" / FETCHED)
            # a trainer with shared weights waits for the server, so that it is never late
            behind = None if pointer is not None else config.batching.max_staleness
            follow = partial(follow_policy, path_of=receiver.path_of, max_behind=behind, shared=pointer)
            tasks.start_soon(follow, service, own, loaded, config.training.name)
            await loaded.wait()
        await service.retrying("register")(register, service.bus, service.run, role, url)
        await anyio.to_thread.run_sync(write_private, url_file(config.path, role), url)
        if (path := key_path(config, role)) is not None:
            log.info("requests for samples must bear the key that %s holds", path)
        service.mark_ok()
        await service.retrying("stay registered")(stay_registered, service.bus, service.run, role, url)
