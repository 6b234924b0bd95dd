"""Stores the gateway's registrations, partial groups and handed-out batches in the run's bucket.

Guarantees that a change is stored when its call returns, and that if a run has two gateways, the earlier one ends
(`FencedError`) at its next change.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StoredValueError
from lachesis.pipeline.extensions.atropos.gateway.keys import stored_key
from lachesis.pipeline.extensions.atropos.gateway.logic.buffer import Buffer
from lachesis.pipeline.extensions.atropos.gateway.logic.handed_batches import Consumer
from lachesis.pipeline.extensions.atropos.gateway.logic.posts import StoredPosts
from lachesis.pipeline.extensions.atropos.gateway.logic.registry import Registry
from lachesis.pipeline.runtime.stored_values import unreadable_value
from lachesis.schemas.codec import UNREADABLE

__all__ = ["GatewayStore", "stored_values"]

_REGISTRY = "registry"
_POSTS = "posts"
T = TypeVar("T", Registry, Buffer, Consumer, StoredPosts)


class GatewayStore:
    """The state of one run's gateway. `registry` and `buffers` (by environment) are what is stored; read only."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._revisions: dict[str, int] = {}
        self.registry = Registry()
        self.buffers: dict[str, Buffer] = {}

    @classmethod
    async def open(cls, bus: Bus, envs: list[str]) -> "GatewayStore":
        """Take the state over: its earlier owner can no longer change it."""
        store = cls(bus)
        await store.set_registry(await store._get(_REGISTRY, Registry) or Registry())
        for env in envs:
            await store.set_buffer(env, await store._get(_buffer(env), Buffer) or Buffer())
        return store

    async def set_registry(self, registry: Registry) -> None:
        """Raises `FencedError` when another gateway has taken over."""
        await self._put(_REGISTRY, registry)
        self.registry = registry

    async def set_buffer(self, env: str, buffer: Buffer) -> None:
        """Raises `FencedError` when another gateway has taken over."""
        await self._put(_buffer(env), buffer)
        self.buffers[env] = buffer

    async def consumer(self, name: str) -> Consumer | None:
        """Return the consumer of that name as it is stored, None if there is none yet."""
        return await self._get(_consumer(name), Consumer)

    async def set_consumer(self, name: str, consumer: Consumer) -> None:
        """Raises `FencedError` when another gateway has taken over."""
        await self._put(_consumer(name), consumer)

    async def posts(self) -> StoredPosts:
        """Return which posts were stored when that was noted last."""
        return await self._get(_POSTS, StoredPosts) or StoredPosts()

    async def set_posts(self, posts: StoredPosts) -> None:
        """Raises `FencedError` when another gateway has taken over."""
        await self._put(_POSTS, posts)

    async def _get(self, name: str, kind: type[T]) -> T | None:
        entry = await self._bus.value(stored_key(name))
        if entry is None:
            return None
        self._revisions[name] = entry.revision
        return _decode(name, entry.value, kind)

    async def _put(self, name: str, value: Registry | Buffer | Consumer | StoredPosts) -> None:
        data, at = msgspec.msgpack.encode(value), self._revisions.get(name, 0)
        self._revisions[name] = await self._bus.put(stored_key(name), data, revision=at)


def _check_stored(name: str, value: bytes) -> None:
    """Raise `StoredValueError` where the gateway cannot go on from what its key `name` holds."""
    kinds: dict[str, Any] = {_REGISTRY: Registry, _POSTS: StoredPosts, "buffer": Buffer, "consumer": Consumer}
    _decode(name, value, kinds[name.partition("-")[0]])


def _decode(name: str, value: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except UNREADABLE as error:
        raise StoredValueError(unreadable_value(stored_key(name), error)) from error


def _buffer(env: str) -> str:
    return f"buffer-{env}"


def _consumer(name: str) -> str:
    return f"consumer-{name}"


def stored_values(config: RunConfig) -> Iterator[tuple[str, Callable[[bytes], object]]]:
    """Yield the gateway's keys, each with what raises `SchemaError` for a value it cannot go on from."""
    names = (_REGISTRY, _POSTS, *map(_buffer, config.environments), _consumer(config.training.name))
    for name in names:
        yield stored_key(name), partial(_check_stored, name)
