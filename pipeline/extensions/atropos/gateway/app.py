"""Serves the Atropos trajectory API over HTTP, as a Starlette application.

Guarantees: success is answered only once the data is stored; an invalid request gets 422 with the reason, one that does
not arrive in time 408, and one that cannot be stored in time 503 with Retry-After; if a token is set, only its holders
are served; and scripts of web pages are refused, even on loopback. The trainer's routes are served if the run has no
trainer of its own.

    GET  /  /wandb_info  /info  /status  /status-env  /latest_example  /reset_data  /curriculum  /batch
    POST /register-env  /disconnect-env  /scored_data  /scored_data_list  /register
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
from collections.abc import Awaitable, Callable, Container
from functools import partial
from typing import Any

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.pipeline.extensions.atropos.gateway.batch_response import BatchResponse, zipped_for
from lachesis.pipeline.extensions.atropos.gateway.body import BodyBudget, BrokenGzipError, SlowBodyError, unpacked
from lachesis.pipeline.extensions.atropos.gateway.curriculum import CurriculumWeights
from lachesis.pipeline.extensions.atropos.gateway.intake import BusyError, Intake
from lachesis.pipeline.extensions.atropos.gateway.logic.refused_clients import RefusedClients
from lachesis.pipeline.extensions.atropos.gateway.logic.registry import describe_unmet_allocation, environment_of
from lachesis.pipeline.extensions.atropos.gateway.logic.silence import HeardClients
from lachesis.pipeline.extensions.atropos.gateway.policies import PolicyVersions
from lachesis.pipeline.extensions.atropos.gateway.protocol import EnvironmentId, RegisterEnv, RegisterTrainer
from lachesis.pipeline.extensions.atropos.gateway.settings import GatewaySettings
from lachesis.pipeline.extensions.atropos.gateway.store import GatewayStore
from lachesis.pipeline.extensions.atropos.gateway.trainers import HandedReply, Trainers
from lachesis.pipeline.extensions.atropos.logic.scored_data import read_json
from lachesis.pipeline.runtime.http import BrowserGuard
from lachesis.pipeline.telemetry.spans import parent_span
from lachesis.schemas.errors import DataError, LachesisError

__all__ = ["PATHS", "Gateway", "build_app"]

log = logging.getLogger("lachesis")

Handler = Callable[[Request], Awaitable[Any]]

_RETRY_AFTER_S = 5
_READERS = 8
"""Bodies unpacked and converted at once, so that what they take in memory is bounded."""
_SMALL_BODY_BYTES = 64 << 10
_EXAMPLE_KEYS = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs", "messages",
    "images",
)  # fmt: skip
_NO_TRAINER_TEXT = (
    "this run has a trainer of its own, which reads the batches from the ledger; to train with another one set "
    'mode = "observe" in its configuration'
)


PATHS = frozenset({"/register-env", "/disconnect-env", "/status-env", "/scored_data", "/scored_data_list"})
"""Paths that environments use while they work."""


def build_app(gateway: Gateway, hosts: Container[str] | None = None) -> Starlette:
    """Return the application. `hosts`: see `BrowserGuard`."""
    get: dict[str, Handler] = {
        "/": gateway.root,
        "/wandb_info": gateway.wandb_info,
        "/info": gateway.info,
        "/status": gateway.status,
        "/status-env": gateway.status_env,
        "/latest_example": gateway.latest_example,
        "/reset_data": gateway.reset_data,
        "/curriculum": gateway.curriculum,
        "/batch": gateway.batch,
    }
    post: dict[str, Handler] = {
        "/register-env": gateway.register_env,
        "/disconnect-env": gateway.disconnect_env,
        "/scored_data": gateway.scored_data,
        "/scored_data_list": gateway.scored_data_list,
        "/register": gateway.register,
    }
    routes = [Route(path, gateway.answer(handler), methods=["GET"]) for path, handler in get.items()]
    routes += [Route(path, gateway.answer(handler), methods=["POST"]) for path, handler in post.items()]
    guard = Middleware(BrowserGuard, hosts=hosts, refuse=lambda why: _detail(403, DataError(why)))
    return Starlette(routes=routes, middleware=[guard, Middleware(GZipMiddleware, minimum_size=1000)])


class Gateway:
    """`outstanding`: sequences stored, leased or not trained yet, by the governor; None until its first message.

    `trainers` is None if the run has a trainer of its own. `failed` is called with an error that must end the service.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        store: GatewayStore,
        policies: PolicyVersions,
        intake: Intake,
        weights: CurriculumWeights,
        *,
        trainers: Trainers | None = None,
        token: str | None,
        failed: Callable[[LachesisError], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._policies = policies
        self._intake = intake
        self._weights = weights
        self._trainers = trainers
        self._token = token
        self._failed = failed
        self._bodies = BodyBudget(settings.http.receiving_bytes, settings.http.body_s)
        self._reading = anyio.CapacityLimiter(_READERS)
        self._registering = anyio.Lock()
        self.outstanding: int | None = None
        self.refused = 0
        self.without_token = RefusedClients()
        self._heard = HeardClients(anyio.current_time())

    def silent_environments(self) -> list[str]:
        """Return the environments that have sent no request for long, and have nothing under way here.

        Return none once all steps are taken, because the environments end then.
        """
        steps = self._settings.steps
        if self._trainers is None and steps is not None and self._step() >= steps:
            return []
        now_s = anyio.current_time()
        return [
            env
            for env in self._intake.envs
            if not self._intake.held_sequences[env]
            and not self._intake.is_waiting(env)
            and self._heard.is_silent(env, now_s)
        ]

    def is_silent(self, env: str) -> bool:
        """Return whether an environment has sent no request for longer than is usual for it."""
        return self._heard.is_silent(env, anyio.current_time())

    def was_heard(self, env: str) -> bool:
        """Return whether an environment has sent a request in this life of the gateway."""
        return self._heard.was_heard(env)

    def _hear(self, env: str) -> None:
        self._heard.hear(env, anyio.current_time())

    def answer(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Turn a handler's value into JSON, and its errors into the API's answers."""

        async def endpoint(request: Request) -> Response:
            refusal = self._refusal(request)
            if refusal is not None:
                return refusal
            try:
                found = await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)  # the client is gone
            except LachesisError as error:
                return self._excuse(error)
            return found if isinstance(found, Response) else _json(found)

        return endpoint

    def _excuse(self, error: LachesisError) -> Response:
        if isinstance(error, BrokenGzipError):
            return PlainTextResponse("Invalid gzip payload", 400)
        if isinstance(error, NotFoundError):
            return _detail(404, error)
        if isinstance(error, DataError):
            self.refused += 1
            if isinstance(error, SlowBodyError):  # the rest of the body is not wanted
                return _detail(408, error, {"Connection": "close"})
            return _detail(422, error)
        self._give_up(error)
        return _detail(503, error, {"Retry-After": str(_RETRY_AFTER_S)})

    def _refusal(self, request: Request) -> Response | None:
        """Return the refusal of a client without the token; None: it has it, or none is needed."""
        if self._token is None or hmac.compare_digest(_credentials(request)[1].encode(), self._token.encode()):
            return None
        self.without_token.record(request.url.path, anyio.current_time())
        challenge = {"WWW-Authenticate": 'Basic realm="lachesis"'}
        return _detail(401, DataError("send the gateway's token, as bearer token or as password"), challenge)

    # queries

    async def root(self, _: Request) -> Any:
        return {"message": "AtroposLib API"}

    async def wandb_info(self, _: Request) -> Any:
        if self._policies.newest_version is None:
            return {"group": None, "project": None}
        registered = self._trainers.registered if self._trainers else None
        if registered is not None:
            return {"group": registered.wandb_group, "project": registered.wandb_project}
        return {
            "group": self._settings.run,
            "project": self._settings.tracked,
        }

    async def info(self, _: Request) -> Any:
        longest = max(env.longest_tokens for env in self._intake.envs.values())
        return {"batch_size": self._settings.batch_size, "max_token_len": longest}

    async def status(self, _: Request) -> Any:
        size = self._store.registry.largest_group()
        return {"current_step": self._step(), "queue_size": self._queued_groups(None, size)}

    async def status_env(self, request: Request) -> Any:
        """Return the figures with which an environment throttles itself.

        `queue_size` counts groups that are stored, leased or in batches, and its own waiting groups: see
        `_queued_groups`.
        """
        number = await self._env_id(request)
        registry = self._store.registry
        registered = registry.of(number)
        self._hear(registered.env)
        size = registered.request.group_size
        own = self._intake.held_sequences[registered.env] + self._store.buffers[registered.env].sequences(number)
        return {
            "current_step": self._step(),
            "queue_size": self._queued_groups(registered.env, size),
            "unallocated_fraction": registry.unallocated(),
            "self_queue_size": own // size,
            "max_group_size": registry.largest_group(),
            "env_weight": registry.weight(number),
        }

    async def latest_example(self, _: Request) -> Any:
        batched = self._trainers.latest if self._trainers else None
        return self._intake.latest or batched or {key: [] for key in _EXAMPLE_KEYS}

    async def curriculum(self, request: Request) -> Any:
        return self._weights.respond(request, self._store.registry)

    def _step(self) -> int:
        """Return the optimizer steps that the newest weights hold."""
        newest = self._policies.newest_version
        return 0 if newest is None else newest.policy_version.step

    def _queued_groups(self, env: str | None, size: int) -> int:
        """Return for `env` how many groups of `size` wait for training, always fewer than the remaining steps need.

        An environment ends by itself once enough groups wait for the last step. But not all of them will be trained on:
        groups with equal rewards will not, nor those that it cancels when it ends.
        """
        stored = max(0, (self.outstanding or 0) - self._intake.generating_sequences())
        waiting = stored + self._intake.waiting_sequences(env)
        steps = self._settings.steps
        registered = self._trainers.registered if self._trainers else None
        if registered is not None:
            steps = registered.num_steps
        if steps is not None and self._step() < steps:
            waiting = min(waiting, (steps - self._step()) * self._settings.batch_size - 1)
        return waiting // size

    async def _env_id(self, request: Request) -> int:
        text = request.query_params.get("env_id")
        if text is not None:
            return read_json(EnvironmentId, msgspec.json.encode({"env_id": text})).env_id
        return read_json(EnvironmentId, await self._small_body(request)).env_id

    # changes

    async def register_env(self, request: Request) -> Any:
        asked = read_json(RegisterEnv, await self._small_body(request))
        env = environment_of(asked.desired_name, self._intake.envs)
        self._hear(env)
        if asked.group_size > self._settings.batch_size:
            raise DataError(
                f"group_size is {asked.group_size}, but a batch has {self._settings.batch_size} sequences and "
                "groups are never split"
            )
        if self._policies.newest_version is None:
            return {"status": "wait for trainer to start"}
        async with self._registering:
            registry, number = self._store.registry.register(asked, env)
            await self._set_registry(registry)
        mix = self._settings.mix
        if unmet := describe_unmet_allocation(asked.min_batch_allocation, env, self._settings.environments, mix):
            log.warning("%s", unmet)
        registered = self._trainers.registered if self._trainers else None
        every = registered.save_checkpoint_interval if registered else self._settings.checkpoint_every
        schedule = {
            "checkpoint_dir": str(self._settings.folder / "environments"),
            "checkpoint_interval": every,
            # the API has no word for "until it is stopped"
            "num_steps": registered.num_steps if registered else self._settings.steps or (1 << 31) - 1,
        }
        return {
            "status": "success",
            "env_id": number,
            "wandb_name": registry.of(number).name,
            "starting_step": self._step(),
            **schedule,
        }

    async def disconnect_env(self, request: Request) -> Any:
        """Forget an environment, after its buffer, which waits for groups that will not come, is published."""
        number = read_json(EnvironmentId, await self._small_body(request)).env_id
        try:
            async with self._registering:
                await self._set_registry(self._store.registry.disconnect(number))
            await self._intake.release(number, self._store.registry.of(number).env)
        except (NotFoundError, BusyError) as error:
            return {"status": "failure", "error": str(error)}
        return {"status": "success"}

    async def reset_data(self, _: Request) -> Any:
        """Forget registrations and buffered groups.

        Stored groups stay: history is not deleted here.
        """
        if self._trainers is not None:
            await self._trainers.forget_members()
        async with self._registering:
            await self._set_registry(self._store.registry.reset())
        await self._intake.forget()
        return PlainTextResponse("Reset successful")

    async def scored_data(self, request: Request) -> Any:
        (answer,) = await self._store_groups(request, several=False)
        return answer

    async def scored_data_list(self, request: Request) -> Any:
        answers = await self._store_groups(request, several=True)
        buffered = [answer for answer in answers if answer["status"] == "buffered"]
        reply: dict[str, Any] = {"status": "received", "groups_processed": len(answers)}
        if buffered:
            reply |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]["buffer_size"]}
        return reply

    async def _store_groups(self, request: Request, *, several: bool) -> list[dict[str, Any]]:
        most = self._settings.http.body_bytes
        async with self._bodies.receive(request, most) as data, self._reading:
            body = unpacked(request, data, most)
            caller = parent_span(request.headers.get("traceparent", ""))
            items = await self._intake.convert_groups(body, several=several, caller=caller)
        del data, body  # a request that is held holds its encoded groups alone
        for env in {item.env for item in items}:
            self._hear(env)
        return await self._intake.store(items, request.is_disconnected)

    async def _small_body(self, request: Request) -> bytes:
        async with self._bodies.receive(request, _SMALL_BODY_BYTES) as data:
            return unpacked(request, data, _SMALL_BODY_BYTES)

    # the trainer's side

    async def register(self, request: Request) -> Any:
        if self._trainers is None:
            return _detail(501, DataError(_NO_TRAINER_TEXT))
        asked = read_json(RegisterTrainer, await self._small_body(request))
        return {"uuid": await self._trainers.register(_credentials(request)[0], asked)}

    async def batch(self, request: Request) -> Any:
        """Send a trainer its batch; while the broker is unavailable there is none.

        An error would end the usual client.
        """
        if self._trainers is None:
            return _detail(501, DataError(_NO_TRAINER_TEXT))
        try:
            reply = await self._trainers.next_batch(_credentials(request)[0])
        except DataError as error:  # a name that cannot be, or one that has not registered
            return {"status": "error", "message": str(error), "batch": []}
        except LachesisError as error:
            self._give_up(error)
            reply = None
        if reply is None:
            return {"batch": None}
        body, headers = await zipped_for(request, reply.data)
        return BatchResponse(body, headers, partial(self._record_receipt, self._trainers, reply))

    async def _record_receipt(self, trainers: Trainers, reply: HandedReply, *, received: bool) -> bool:
        try:
            return await trainers.record_receipt(reply, received=received)
        except LachesisError as error:
            self._give_up(error)
            return False

    def _give_up(self, error: LachesisError) -> None:
        """End the service, unless the error is an unavailable broker."""
        if not isinstance(error, InfrastructureError):  # another gateway has taken over, or the server refuses this one
            self._failed(error)

    async def _set_registry(self, registry: Any) -> None:
        with anyio.CancelScope(shield=True):  # a write given up half-way would leave its revision unknown
            await self._store.set_registry(registry)


def _credentials(request: Request) -> tuple[str, str]:
    """Return the user name of a request, empty if there is none, and its token."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic":
        try:
            user, _, token = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return "", ""
        return user, token
    return "", value.strip() if kind.lower() == "bearer" else ""


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _detail(status: int, error: Exception, headers: dict[str, str] | None = None) -> Response:
    return _json({"detail": [{"type": "value_error", "loc": ["body"], "msg": str(error)}]}, status, headers)
