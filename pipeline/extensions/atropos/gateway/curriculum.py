"""Serves the curriculum's weights to environments elsewhere, which draw their items by them.

    GET /curriculum?env_id=3        (or ?env=NAME; neither is needed where the run has one such environment)

    {"env": "gsm8k", "strategy": "irt", "version": "812-9f...", "unknown": 1.31, "weights": {"gsm8k-17": 0.42, ...}}

Weights are relative to each other; an item that is not listed has the weight `unknown`. Before the curriculum has
published any, `version` is null, no item is listed, and `unknown` is 1: draw evenly. The ETag names the version, and a
request whose If-None-Match names it is answered 304, without a body.
"""

import logging
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.extensions.atropos.gateway.logic.registry import Registry
from lachesis.schemas import keys
from lachesis.schemas.codec import decode
from lachesis.schemas.control import CurriculumSnapshot
from lachesis.schemas.errors import DataError, SchemaError

__all__ = ["CurriculumWeights"]

log = logging.getLogger("lachesis")


class CurriculumWeights:
    """The newest weights of the run's environments `envs`; run `follow` in a task beside the requests."""

    def __init__(self, envs: list[str], strategy: str) -> None:
        self._strategy = strategy
        self._snapshots: dict[str, CurriculumSnapshot | None] = dict.fromkeys(envs)
        self._bodies: dict[str, bytes] = {}

    async def follow(self, bus: Bus, revision: str, env: str) -> None:
        """Follow the versions that the curriculum publishes for `env`. Runs until cancelled."""
        async with bus.watch(keys.curriculum(revision, env)) as entries:
            async for entry in entries:
                try:
                    snapshot = decode(CurriculumSnapshot, entry.value)
                except SchemaError as error:
                    log.warning("a snapshot of the curriculum cannot be read: %s", error)
                    continue
                if snapshot.names is None:
                    log.warning("snapshot %s of %s names no items, so no client can draw by it", snapshot.id, env)
                    continue
                self._snapshots[env] = snapshot
                self._bodies.pop(env, None)

    def respond(self, request: Request, registry: Registry) -> Response:
        """Answer a request.

        Raises `DataError` if it does not name its environment, `NotFoundError` if that is not known.
        """
        env = self._env(request, registry)
        snapshot = self._snapshots[env]
        version = "none" if snapshot is None else snapshot.id
        headers = {"ETag": f'W/"{version}"', "Cache-Control": "no-cache"}
        known = request.headers.get("if-none-match", "").split(",")
        if version in (tag.strip().removeprefix("W/").strip('"') for tag in known):
            return Response(status_code=304, headers=headers)
        if env not in self._bodies:
            self._bodies[env] = self._body(env, snapshot)
        return Response(self._bodies[env], headers=headers, media_type="application/json")

    def _env(self, request: Request, registry: Registry) -> str:
        number, name = request.query_params.get("env_id"), request.query_params.get("env")
        if number is not None and name is None:
            if not (number.isascii() and number.isdecimal() and len(number) < 20):
                raise DataError(f"env_id {number[:40]!r} is no number that POST /register-env returned")
            name = registry.of(int(number)).env
        if name is None and len(self._snapshots) == 1:
            return next(iter(self._snapshots))
        if name not in self._snapshots:
            raise DataError(
                f"env {str(name)[:64]!r}: give env_id, or env as one of the run's environments behind the gateway: "
                f"{', '.join(self._snapshots)}"
            )
        return name

    def _body(self, env: str, snapshot: CurriculumSnapshot | None) -> bytes:
        answer: dict[str, Any] = {
            "env": env,
            "strategy": self._strategy,
            "version": None,
            "unknown": 1.0,
            "weights": {},
        }
        if snapshot is not None and snapshot.names is not None:
            *weights, unknown = snapshot.values().tolist()
            named = dict(zip(snapshot.names, weights, strict=True))
            answer |= {
                "strategy": snapshot.strategy, "version": snapshot.id, "unknown": unknown, "weights": named,
            }  # fmt: skip
        return msgspec.json.encode(answer)
