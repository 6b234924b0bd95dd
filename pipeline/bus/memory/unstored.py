"""Carries what the bus in memory does not store: requests with one answer, and broadcasts."""

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.routing import matches
from lachesis.pipeline.bus.subscription_buffer import SubscriptionBuffer
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import BusClosedError, InfrastructureError, UnservedError
from lachesis.schemas.errors import DataError

__all__ = ["UnstoredMessages"]


@dataclass(slots=True)
class _MemoryRequest:
    data: bytes
    answered: anyio.Event = field(default_factory=anyio.Event)
    answer: bytes | Exception = b""


@dataclass(slots=True)
class _MemoryService:
    questions: deque[_MemoryRequest] = field(default_factory=deque)
    arrived: anyio.Event = field(default_factory=anyio.Event)


class UnstoredMessages:
    """Services and listeners by subject."""

    def __init__(self) -> None:
        self._services: dict[str, list[_MemoryService]] = {}
        self._listeners: list[tuple[str, SubscriptionBuffer]] = []

    def close(self) -> None:
        for _, inbox in self._listeners:
            inbox.fail(BusClosedError("the bus was closed"))

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        services = [one for pattern, some in self._services.items() if matches(pattern, subject) for one in some]
        if not services:
            raise UnservedError(f"no process serves {subject}")
        question = _MemoryRequest(data)
        services[0].questions.append(question)
        services[0].arrived.set()
        with anyio.move_on_after(timeout_s):
            await question.answered.wait()
        if not question.answered.is_set():
            raise InfrastructureError(f"no answer on {subject} within {timeout_s} s")
        if isinstance(question.answer, Exception):
            raise question.answer
        return question.answer

    @asynccontextmanager
    async def serve(
        self, subject: str, handler: Callable[[bytes], Awaitable[bytes]], at_once: int
    ) -> AsyncIterator[None]:
        service = _MemoryService()
        async with background() as tasks:
            self._services.setdefault(subject, []).append(service)
            for _ in range(at_once):
                tasks.start_soon(_answer, service, handler)
            try:
                yield
            finally:
                self._services[subject].remove(service)

    def broadcast(self, subject: str, data: bytes) -> None:
        message = StoredMessage("", subject, 0, bytes(data), time.time_ns())
        for pattern, inbox in self._listeners:
            if matches(pattern, subject):
                inbox.push(message)

    @asynccontextmanager
    async def listen(self, subject: str, limit: int) -> AsyncIterator[AsyncIterator[StoredMessage]]:
        listener = (subject, SubscriptionBuffer(limit))
        self._listeners.append(listener)
        try:
            yield listener[1]
        finally:
            self._listeners.remove(listener)


async def _answer(service: _MemoryService, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
    while True:
        while not service.questions:
            if service.arrived.is_set():
                service.arrived = anyio.Event()
            await service.arrived.wait()
        question = service.questions.popleft()
        try:
            question.answer = await handler(question.data)
        except (DataError, InfrastructureError) as error:
            question.answer = error
        question.answered.set()
