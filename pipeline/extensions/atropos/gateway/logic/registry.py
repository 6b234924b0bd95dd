"""Records which environments have registered with the gateway, and computes the API's replies to them.

Pure; stored as one value.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Self

import msgspec

from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.extensions.atropos.gateway.protocol import RegisterEnv
from lachesis.schemas.errors import DataError

__all__ = ["Registration", "Registry", "describe_unmet_allocation", "environment_of"]

MAX_REGISTRATIONS = 256
"""Registrations remembered; beyond it those that disconnected are forgotten, the oldest first."""
MIN_WEIGHT = 0.01
"""So that no environment is starved."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """One registration: `env` is the environment of the run that it publishes for, `name` its name for trackers."""

    env: str
    name: str
    request: RegisterEnv
    connected: bool = True


class Registry(msgspec.Struct, frozen=True, kw_only=True):
    """Registrations by id. Ids are never used again, so a client that outlives a reset cannot speak for another."""

    next_id: int = 0
    registered: dict[int, Registration] = {}

    def register(self, request: RegisterEnv, env: str) -> tuple[Self, int]:
        """Return the registry with one more, and its id. Raises `DataError` when too many are connected."""
        kept = dict(self.registered)
        if len(kept) >= MAX_REGISTRATIONS:
            gone = next((number for number, other in kept.items() if not other.connected), None)
            if gone is None:
                raise DataError(
                    f"{MAX_REGISTRATIONS} environments are connected; disconnect those that are gone, or GET "
                    "/reset_data"
                )
            del kept[gone]
        earlier = sum(other.request.desired_name == request.desired_name for other in kept.values())
        kept[self.next_id] = Registration(env=env, name=f"{request.desired_name}_{earlier}", request=request)
        return msgspec.structs.replace(self, next_id=self.next_id + 1, registered=kept), self.next_id

    def disconnect(self, number: int) -> Self:
        """Raises `NotFoundError`."""
        gone = msgspec.structs.replace(self.of(number), connected=False)
        return msgspec.structs.replace(self, registered=self.registered | {number: gone})

    def reset(self) -> Self:
        return msgspec.structs.replace(self, registered={})

    def of(self, number: int) -> Registration:
        """Raises `NotFoundError`."""
        found = self.registered.get(number)
        if found is None:
            raise NotFoundError(f"env_id {number}: not registered, or forgotten by a reset; POST /register-env")
        return found

    def weight(self, number: int) -> float:
        """Return the share of inference that an environment should take. Raises `NotFoundError`."""
        own = self.of(number).request
        total = sum(_demand(other.request) for other in self._connected())
        return max(MIN_WEIGHT, _demand(own) / total) if total > 0 else MIN_WEIGHT

    def unallocated(self) -> float:
        """Return the share of a batch that no connected environment has requested for itself."""
        return 1.0 - min(1.0, sum(other.request.min_batch_allocation or 0.0 for other in self._connected()))

    def largest_group(self) -> int:
        return max((other.request.group_size for other in self._connected()), default=1)

    def _connected(self) -> list[Registration]:
        return [other for other in self.registered.values() if other.connected]


def _demand(request: RegisterEnv) -> float:
    return request.max_token_length * max(0.0, request.weight)


def describe_unmet_allocation(
    asked: float | None, env: str, known: Collection[str], mix: Mapping[str, float]
) -> str | None:
    """Return why the run does not grant the part of a batch that an environment requested, or None.

    `known` are all environments of the run, `mix` is `batching.mix`.
    """
    if not asked or len(known) < 2:
        return None
    wanted = f"environment {env} asks for {asked:.0%} of each batch (min_batch_allocation)"
    if not mix:
        return f"{wanted}, and batching.mix is not set: the oldest groups come first; weigh the environments there"
    share = mix.get(env, 1.0) / sum(mix.get(name, 1.0) for name in known)
    return None if share >= asked else f"{wanted}, and batching.mix gives it {share:.0%}: raise its weight there"


def environment_of(desired_name: str, known: Iterable[str]) -> str:
    """Return the environment of the run that is called so, other characters than its own read as '_'.

    Raises `DataError` naming the setting that is missing.
    """
    name, names = re.sub(r"[^A-Za-z0-9_-]", "_", desired_name)[:64], list(known)
    if name in names:
        return name
    raise DataError(
        f"desired_name {desired_name!r}: the run has no such environment; add [environments.{name}] with "
        f'kind = "gateway" to its configuration; known: {", ".join(names) or "none"}'
    )
