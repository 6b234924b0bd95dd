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

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.loopback import LOOPBACK
from lachesis.pipeline.common.private_file import write_private
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.errors import InfrastructureError, StartupError
from lachesis.pipeline.inference.directory import (
    InferenceDirectory,
    control_token,
    register,
    stay_registered,
    url_file,
)
from lachesis.pipeline.inference.policy_follower import follow_policy
from lachesis.pipeline.inference.serving.app import SAMPLING_PATHS, TEXT_PATHS
from lachesis.pipeline.inference.serving.sampling_notice import SamplingNotice
from lachesis.pipeline.inference.serving.traces import TracedRequests
from lachesis.pipeline.inference.settings import ServerSettings
from lachesis.pipeline.runtime.http import HttpServer, RequestCounter, host_of
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.weights.download import FETCHED, WeightsReceiver

__all__ = ["allowed_hosts", "announce", "serve_role"]

log = logging.getLogger("lachesis")


def local_url(settings: ServerSettings, listener: socket.socket) -> str:
    """Return the URL by which this machine reaches the listening server."""
    return f"http://{settings.config.local_address}:{listener.getsockname()[1]}"


def allowed_hosts(settings: ServerSettings, listener: socket.socket) -> set[str] | None:
    """Return the names of hosts that requests may bear; None: any (see `BrowserGuard`)."""
    url = settings.config.advertise or local_url(settings, listener)
    return {host_of(urlsplit(url).netloc)} if settings.config.host in LOOPBACK else None


async def serve_role(
    service: Service,
    settings: ServerSettings,
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
    role, temperature = settings.role, settings.expected_temperature
    if temperature is not None:
        app = SamplingNotice(app, TEXT_PATHS, temperature, partial(service.set_problem, "sampling"))
    traced = TracedRequests(app, service, role, SAMPLING_PATHS) if service.tracing.on else app
    counted = RequestCounter(traced, service.answered, SAMPLING_PATHS)
    server = HttpServer.over(counted, grace_s=5)
    url = local_url(settings, listener)

    async def count() -> None:
        while True:
            service.vitals.in_flight, service.vitals.lag = load()
            try:
                check_alive()
            except InfrastructureError as error:
                raise StartupError(f"inference.{role}: {error}") from error
            await sleep_until_tick(1.0)

    async with InferenceDirectory(timeout_s=120.0) as own, background() as tasks:
        await own.use(url, control_token(settings.folder, role))
        tasks.start_soon(server.stop_on_drain, service)
        tasks.start_soon(count)
        tasks.start_soon(partial(announce, service, settings, own, settings.config.advertise or url, pointer=pointer))
        await server.serve_until_cancelled([listener])


async def announce(
    service: Service, settings: ServerSettings, own: InferenceDirectory, url: str, *, pointer: Path | None
) -> None:
    """Register the server, the policy's once it holds a published version; then keep both so.

    `pointer`: to the trainer's weights, where they are in shared memory.
    """
    role = settings.role
    async with service.until_drained(), anyio.create_task_group() as tasks:
        if role == "policy":
            await service.starts_with("waiting for the trainer to publish a policy")
            loaded = anyio.Event()
            receiver = WeightsReceiver(service.bus, service.run, settings.folder / "weights" / FETCHED)
            # a trainer with shared weights waits for the server, so that it is never late
            behind = None if pointer is not None else settings.max_staleness
            follow = partial(follow_policy, path_of=receiver.path_of, max_behind=behind, shared=pointer)
            tasks.start_soon(follow, service, own, loaded, settings.trainer)
            await loaded.wait()
        await service.retrying("register")(register, service.bus, service.run, role, url)
        await anyio.to_thread.run_sync(write_private, url_file(settings.folder, role), url)
        if (path := settings.access.key_file) is not None:
            log.info("requests for samples must bear the key that %s holds", path)
        service.mark_ok()
        await service.retrying("stay registered")(stay_registered, service.bus, service.run, role, url)
