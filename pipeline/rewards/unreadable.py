"""Scores that cannot be read: whose they were is not known, and yet nobody may wait for them for ever.

What goes in: the messages that could not be read, and how far the writer has read its streams. What comes out, after a
deadline: a dead letter for each rollout that was stored when the message was found and still has no outcome. The
letters come back by way of EVENTS and close the rollouts' window, and the ledger counts them as dead.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import anyio

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.rewards.logic.generations import RevisionNormalizers
from lachesis.pipeline.runtime.deadletter import dead_letter, store_dead_letter
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.errors import DataError, InfrastructureError

__all__ = ["UnreadableScores"]


class _UnreadableMessage(NamedTuple):
    message: StoredMessage
    last: int
    due_s: float


class UnreadableScores:
    """The messages of one environment that could not be read and are not given up yet, in the order of EVENTS."""

    def __init__(self, service: Service, env: str, normalizer: RevisionNormalizers, *, deadline_s: float) -> None:
        self._service = service
        self._normalizer = normalizer
        self._deadline_s = deadline_s
        self._rollouts = subjects.rollout(service.run, env)
        self._scores = subjects.event("score", service.run, service.revision, env)
        self._lost: deque[_UnreadableMessage] = deque()
        self._read: dict[str, int] = {}
        self._moved = anyio.Event()

    def start(self, cursors: Mapping[str, int]) -> None:
        """Say from where the writer reads: all before that it knows."""
        self._read = {stream: cursor - 1 for stream, cursor in cursors.items()}

    def mark_read(self, message: StoredMessage) -> None:
        """Say that the writer has taken in `message`."""
        self._read[message.stream] = message.seq
        if self._lost:
            self._move()

    async def hold(self, message: StoredMessage) -> None:
        """Take in a message of EVENTS that cannot be read.

        Raises `InfrastructureError` once the service drains.
        """
        last = await self._last(subjects.ROLLOUTS, self._rollouts)
        self._lost.append(_UnreadableMessage(message, last, anyio.current_time() + self._deadline_s))
        self._move()

    def oldest_source(self) -> int | None:
        """Return the sequence in EVENTS of the first message not given up yet: a restart has to read it again."""
        return self._lost[0].message.seq if self._lost else None

    async def bury_at_deadlines(self) -> None:
        """Write dead letters at each deadline for all groups that still wait.

        Runs until cancelled, or until the service drains.
        """
        try:
            while True:
                while not self._lost:
                    await self._wait()
                await anyio.sleep_until(self._lost[0].due_s)
                await self._catch_up()
                await self._bury(self._lost[0])
                self._lost.popleft()
        except InfrastructureError:
            if not self._service.draining.is_set():
                raise

    async def _catch_up(self) -> None:
        """Wait until the writer has read what is stored now: a score that came in time must count."""
        for stream, subject in ((subjects.ROLLOUTS, self._rollouts), (subjects.EVENTS, self._scores)):
            last = await self._last(stream, subject)
            while self._read[stream] < last:
                await self._wait()

    async def _bury(self, lost: _UnreadableMessage) -> None:
        where = f"sequence {lost.message.seq} of {lost.message.stream}"
        error = DataError(f"no score; it may have been in what cannot be read at {where}")
        letter = dead_letter(self._service, lost.message, "deadline", error)
        for seq, group in self._normalizer.unresolved(lost.last):
            given_up = letter.replace(stream=subjects.ROLLOUTS, seq=seq, group=group, trace_id=group)
            await store_dead_letter(self._service, given_up)

    async def _last(self, stream: str, subject: str) -> int:
        """Return the sequence of the last message stored on `subject`, 0 without any."""
        message: StoredMessage | None = await self._service.retrying(f"read {stream}")(
            self._service.bus.last, stream, subject
        )
        return message.seq if message else 0

    async def _wait(self) -> None:
        await self._moved.wait()

    def _move(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()
