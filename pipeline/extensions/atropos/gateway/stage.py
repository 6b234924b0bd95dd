"""Runs the gateway as a service: the HTTP server and the tasks that keep its data current.

It keeps no state of its own: if it is killed at any moment and started again, clients go on as before.
"""

import logging

import anyio

from lachesis.pipeline.bus.addresses import url_host
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.loopback import LOOPBACK
from lachesis.pipeline.common.paths import code_name
from lachesis.pipeline.common.private_file import write_private
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.extensions.atropos.gateway.app import PATHS, Gateway, build_app
from lachesis.pipeline.extensions.atropos.gateway.config import GatewayConfig
from lachesis.pipeline.extensions.atropos.gateway.curriculum import CurriculumWeights
from lachesis.pipeline.extensions.atropos.gateway.intake import Intake
from lachesis.pipeline.extensions.atropos.gateway.known_posts import KnownPosts
from lachesis.pipeline.extensions.atropos.gateway.listener import take_listener
from lachesis.pipeline.extensions.atropos.gateway.policies import PolicyVersions
from lachesis.pipeline.extensions.atropos.gateway.server_identity import ServerIdentity
from lachesis.pipeline.extensions.atropos.gateway.settings import GatewaySettings
from lachesis.pipeline.extensions.atropos.gateway.store import GatewayStore
from lachesis.pipeline.extensions.atropos.gateway.token import GATEWAY_URL, gateway_token
from lachesis.pipeline.extensions.atropos.gateway.trainers import Trainers
from lachesis.pipeline.runtime.heartbeats import read_heartbeat
from lachesis.pipeline.runtime.http import HttpServer, RequestCounter
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError, LachesisError, SchemaError

__all__ = ["run_gateway"]

log = logging.getLogger("lachesis")

_FIGURES_S = 1.0


async def run_gateway(service: Service, settings: GatewaySettings) -> None:
    """Serve until the service drains. Raises `FencedError` once another gateway of the run has taken over."""
    envs = list(settings.foreign)
    if not envs:
        raise ConfigError('environments: none has kind = "gateway", so the gateway would have nothing to publish for')
    token = gateway_token(settings.http, settings.folder)
    policies = PolicyVersions()
    async with ServerIdentity.open(service, settings.policy, policies) as identity:
        await _serve(service, settings, envs, identity, token)


async def _serve(
    service: Service,
    settings: GatewaySettings,
    envs: list[str],
    identity: ServerIdentity,
    token: str | None,
) -> None:
    errors: list[LachesisError] = []
    policies = identity.policies
    with take_listener(settings.http) as listener:
        store: GatewayStore = await service.retrying("read the gateway's state")(GatewayStore.open, service.bus, envs)
        posts = KnownPosts(service.bus, service.run, envs, store)
        await service.retrying("read which posts are stored")(posts.catch_up)
        intake = Intake(service, settings, store, identity, posts)
        weights = CurriculumWeights(envs, code_name(settings.strategy))
        trainers = Trainers(service, settings, store) if settings.trains_over_http else None
        if trainers is not None:
            await trainers.open()

        def failed(error: LachesisError) -> None:
            errors.append(error)
            server.stop()

        gateway = Gateway(settings, store, policies, intake, weights, trainers=trainers, token=token, failed=failed)
        hosts = () if settings.http.host in LOOPBACK else None
        server = HttpServer.over(
            RequestCounter(build_app(gateway, hosts), service.answered, PATHS),
            head_s=settings.http.head_s,
            grace_s=int(max(1.0, settings.drain_s - 2.0)),
        )
        port = listener.getsockname()[1]
        log.info("listening on %s for %s", _url(settings.http, port), ", ".join(envs))
        if token is not None:
            path = settings.folder / GATEWAY_URL
            write_private(path, _url(settings.http, port, token))
            log.info("environments need its token: their --env.rollout_server_url is what %s holds", path)
        async with background() as tasks:
            tasks.start_soon(policies.follow, service.bus)
            tasks.start_soon(intake.renew)
            tasks.start_soon(_give_back_overdue, gateway, intake)
            tasks.start_soon(posts.follow)
            tasks.start_soon(posts.save)
            for env in envs:
                tasks.start_soon(weights.follow, service.bus, service.revision, env)
            tasks.start_soon(_follow_governor, service, gateway)
            tasks.start_soon(_set_figures, service, gateway, intake, port)
            url = _url(settings.http, port) if token is None else f'"$(cat {settings.folder / GATEWAY_URL})"'
            tasks.start_soon(_report_silence, service, gateway, envs, url)
            tasks.start_soon(server.stop_on_drain, service)  # requests that wait for a lease are answered 503
            service.mark_ok()
            await server.serve_until_cancelled([listener])
            await intake.give_back_all()
    if errors:
        raise errors[0]


async def _follow_governor(service: Service, gateway: Gateway) -> None:
    """Follow the number of outstanding sequences, with which environments throttle themselves."""
    async with service.bus.listen(subjects.heartbeat(service.run, "governor")) as beats:
        async for message in beats:
            try:
                figures = read_heartbeat(message).metrics
            except SchemaError:
                continue  # unreadable; the next one follows in a second
            if "flow/outstanding" in figures:
                gateway.outstanding = int(figures["flow/outstanding"])


async def _give_back_overdue(gateway: Gateway, intake: Intake) -> None:
    while True:
        await intake.give_back_overdue(gateway.is_silent)
        await sleep_until_tick(_FIGURES_S)


async def _set_figures(service: Service, gateway: Gateway, intake: Intake, port: int) -> None:
    while True:
        own = {"gateway/port": port, "gateway/refused": gateway.refused}
        service.vitals.metrics = own | intake.figures()
        await sleep_until_tick(_FIGURES_S)


async def _report_silence(service: Service, gateway: Gateway, envs: list[str], url: str) -> None:
    """Report which environments are silent: a person starts those of other projects.

    `url` is the address that they need.
    """
    waits = False
    mend = f"give each environment the gateway's address with the token: --env.rollout_server_url {url}"
    while True:
        silent = gateway.silent_environments()
        text = _silence_text(silent, [env for env in silent if gateway.was_heard(env)], len(envs), url)
        waited, waits = waits, len(silent) == len(envs)
        if waits:
            service.mark_waiting("waiting", text)
        elif waited:
            service.mark_ok()
        service.set_problem("environments", text if silent and not waits else None)
        service.set_problem("token", gateway.without_token.describe(anyio.current_time()), mend=mend)
        await sleep_until_tick(_FIGURES_S)


def _silence_text(silent: list[str], gone: list[str], envs: int, url: str) -> str:
    """Return the report on `silent` environments, of which `gone` were connected before."""
    names = ", ".join(silent)
    if silent != gone:
        return f"nothing is heard of {names}: is it running? Start it with --env.rollout_server_url {url}"
    which = f"the run's only environment, {names}," if envs == 1 else names
    return (
        f"{which} {'has' if len(gone) == 1 else 'have'} gone: nothing is heard any more. It ended, by its own "
        f"total_steps or by an error, or is cut off: start it again with --env.rollout_server_url {url}"
    )


def _url(config: GatewayConfig, port: int, token: str | None = None) -> str:
    host = url_host(config.host)
    return f"http://{'' if token is None else f'lachesis:{token}@'}{host}:{port}"
