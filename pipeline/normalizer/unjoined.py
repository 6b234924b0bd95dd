"""Handles scores that join no rollout.

Such scores cannot be read, or name a rollout that is not stored.

It takes unreadable messages, scores that arrived before their rollouts, and how far the writer has read its streams.
After a deadline it makes a dead letter for each rollout that was stored when an unreadable message was found and still
has no outcome. The letters come back through EVENTS and close the rollouts' window, and the ledger counts them as dead.
Scores that still have no rollout are then dropped, because otherwise EVENTS could never be trimmed beyond them.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import anyio

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.normalizer.logic.revision_normalizers import RevisionNormalizers
from lachesis.pipeline.runtime.dead_letters import dead_letter_at, store_dead_letter
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects

__all__ = ["UnjoinedScores"]

log = logging.getLogger("lachesis")


class _UnreadableMessage(NamedTuple):
    """A message at sequence `seq` of EVENTS. It may have held scores of rollouts up to sequence `last` of ROLLOUTS."""

    seq: int
    last: int
    due_s: float


class _ScoresAhead(NamedTuple):
    """Scores up to sequence `source` of EVENTS, some of which are ahead of the rollouts that they name."""

    source: int
    due_s: float


class UnjoinedScores:
    """One environment's scores that join no rollout and are not given up yet, in the order of EVENTS."""

    def __init__(
        self,
        service: Service,
        env: str,
        normalizer: RevisionNormalizers,
        *,
        deadline_s: float,
        forget: Callable[[Iterable[tuple[str, int]]], None],
    ) -> None:
        """`forget` is given group and sequence in EVENTS of each score that is dropped."""
        self._service = service
        self._env = env
        self._normalizer = normalizer
        self._deadline_s = deadline_s
        self._forget = forget
        self._rollouts = subjects.rollout(service.run, env)
        self._scores = subjects.event("score", service.run, service.revision, env)
        self._held: deque[_UnreadableMessage | _ScoresAhead] = deque()
        self._read: dict[str, int] = {}
        self._moved = anyio.Event()

    def start(self, cursors: Mapping[str, int]) -> None:
        """Say from where the writer reads: all before that it knows."""
        self._read = {stream: cursor - 1 for stream, cursor in cursors.items()}

    def mark_read(self, message: StoredMessage) -> None:
        """Say that the writer has taken in `message`."""
        self._read[message.stream] = message.seq
        if self._held:
            self._notify()

    async def hold(self, message: StoredMessage) -> None:
        """Take in a message of EVENTS that cannot be read.

        Raises `InfrastructureError` once the service drains.
        """
        last = await self._last(subjects.ROLLOUTS, self._rollouts)
        self._held.append(_UnreadableMessage(message.seq, last, anyio.current_time() + self._deadline_s))
        self._notify()

    def watch_ahead(self) -> None:
        """At the deadline, give up scores that are ahead now, unless some are watched already."""
        if self._normalizer.ahead and not any(isinstance(one, _ScoresAhead) for one in self._held):
            due_s = anyio.current_time() + self._deadline_s
            self._held.append(_ScoresAhead(self._read[subjects.EVENTS], due_s))
            self._notify()

    def drop_ahead(self, source: int) -> None:
        """Drop scores up to `source` that are still ahead, when all stored rollouts are known."""
        dropped = self._normalizer.drop_ahead(source)
        self._forget(dropped)
        if dropped:
            log.warning(
                "%s: %d scores up to sequence %d of EVENTS name rollouts that are not stored; they count for nothing",
                self._scores, len(dropped), source,
            )  # fmt: skip

    def oldest_source(self) -> int | None:
        """Return where in EVENTS the first unreadable message is that is not given up yet.

        A restart reads it again. None: there is none.
        """
        return next((one.seq for one in self._held if isinstance(one, _UnreadableMessage)), None)

    async def give_up_at_deadlines(self) -> None:
        """At each deadline write dead letters for all groups that still wait, or drop scores still ahead.

        Runs until cancelled, or until the service drains.
        """
        try:
            while True:
                while not self._held:
                    await self._wait()
                first = self._held[0]
                await anyio.sleep_until(first.due_s)
                await self._catch_up()
                if isinstance(first, _ScoresAhead):
                    self.drop_ahead(first.source)
                else:
                    await self._give_up(first)
                self._held.popleft()
        except InfrastructureError:
            if not self._service.draining.is_set():
                raise

    async def _catch_up(self) -> None:
        """Wait until the writer has read all stored messages: a score that came in time must count."""
        for stream, subject in ((subjects.ROLLOUTS, self._rollouts), (subjects.EVENTS, self._scores)):
            last = await self._last(stream, subject)
            while self._read[stream] < last:
                await self._wait()

    async def _give_up(self, unreadable: _UnreadableMessage) -> None:
        """Store a dead letter for each rollout that may have lost its scores with the message."""
        reason = f"no score; it may have been in what cannot be read at sequence {unreadable.seq} of {subjects.EVENTS}"
        for seq, group in self._normalizer.unresolved(unreadable.last):
            letter = dead_letter_at(
                self._service, subjects.ROLLOUTS, seq, env=self._env, plan=None, kind="deadline", reason=reason
            )
            await store_dead_letter(self._service, letter.replace(group=group, trace_id=group))

    async def _last(self, stream: str, subject: str) -> int:
        """Return the sequence of the last message stored on `subject`, 0 without any."""
        message: StoredMessage | None = await self._service.retrying(f"read {stream}")(
            self._service.bus.last, stream, subject
        )
        return message.seq if message else 0

    async def _wait(self) -> None:
        await self._moved.wait()

    def _notify(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()
