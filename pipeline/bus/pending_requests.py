"""The requests of one connection that wait for answers: each answer is handed to its request. No I/O.

All answers come to one inbox; the last part of their subject, the token, says which request each is to.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from nats.aio.msg import Msg

from lachesis.schemas.errors import LachesisError

__all__ = ["AnswerSeries", "PendingRequest", "PendingRequests", "resolve"]


class PendingRequest(NamedTuple):
    """A request that was sent. `answer` will hold a message, or None once the connection is lost or the time is up."""

    token: str
    answer: "asyncio.Future[Msg | None]"


class AnswerSeries:
    """A request that was sent and has several answers, which queue up here."""

    def __init__(self) -> None:
        self._answers: deque[Msg] = deque()
        self._over = False
        self._waiter: asyncio.Future[Msg | None] | None = None

    async def next(self, timeout_s: float) -> Msg | None:
        """Return the next answer: None when the connection was lost or the time is up."""
        if not self._answers and not self._over:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, resolve, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
        return self._answers.popleft() if self._answers else None

    def push(self, msg: Msg) -> None:
        self._answers.append(msg)
        self._stir()

    def end(self) -> None:
        """Say that no more will come."""
        self._over = True
        self._stir()

    def _stir(self) -> None:
        if self._waiter is not None:
            resolve(self._waiter)


class PendingRequests:
    """All requests of one connection. `inbox`: the subject that answers come under."""

    def __init__(self) -> None:
        self.inbox = ""
        self._tokens = itertools.count()
        self._waiting: dict[str, asyncio.Future[Msg | None]] = {}
        self._series: dict[str, AnswerSeries] = {}

    def reply_to(self, token: str) -> str:
        """Return the subject to which the answers of a request are to be sent."""
        return f"{self.inbox}.{token}"

    def begin(self) -> PendingRequest:
        """Return a request to be sent, whose answer is awaited until it is dropped."""
        request = PendingRequest(str(next(self._tokens)), asyncio.get_running_loop().create_future())
        self._waiting[request.token] = request.answer
        return request

    @contextmanager
    def series(self) -> Iterator[tuple[str, AnswerSeries]]:
        """Yield a token and what will hold its answers, which are awaited while the context lasts."""
        token, series = str(next(self._tokens)), AnswerSeries()
        self._series[token] = series
        try:
            yield token, series
        finally:
            del self._series[token]

    def drop(self, request: PendingRequest) -> None:
        """Forget a request; its answer, should it come, is ignored."""
        self._waiting.pop(request.token, None)
        request.answer.cancel()

    def receive(self, msg: Msg) -> None:
        """Hand an answer to its request."""
        token = msg.subject[len(self.inbox) + 1 :]
        answer = self._waiting.get(token)
        if answer is not None:
            resolve(answer, msg)
        elif token in self._series:
            self._series[token].push(msg)

    def lose(self) -> None:
        """End all waits without an answer: the connection is lost."""
        for answer in self._waiting.values():
            resolve(answer)
        self._end_series()

    def fail(self, error: LachesisError) -> None:
        """Raise `error` in all that wait."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(type(error)(*error.args))
        self._end_series()

    def _end_series(self) -> None:
        for series in self._series.values():
            series.end()


def resolve(answer: "asyncio.Future[Msg | None]", msg: Msg | None = None) -> None:
    """End a wait with a message, or without any, unless it has ended already."""
    if not answer.done():
        answer.set_result(msg)
