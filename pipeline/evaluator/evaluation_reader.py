"""Reads the evaluations of a run from its events, where all of them stay.

Only `lachesis gc` deletes any.
"""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.errors import HistoryLostError
from lachesis.pipeline.evaluator.logic.history import EvaluationHistory
from lachesis.schemas import subjects
from lachesis.schemas.annotations import EvalEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import SchemaError

__all__ = ["EvaluationReader", "decode_evaluation"]

_MAX_AHEAD_NS = 3600 * 10**9
"""By how much the evaluator's clock may be ahead of the server's."""


def decode_evaluation(message: StoredMessage) -> EvalEvent:
    """Return the evaluation that a message holds.

    Raises `SchemaError`, also where it ended long after it was stored: later ones would count as older than it.
    """
    event = decode(EvalEvent, message.data)
    ahead_ns = event.ended_ns - message.time_ns
    if ahead_ns > _MAX_AHEAD_NS:
        raise SchemaError(
            f"{message.subject}: the evaluation at sequence {message.seq} ended {ahead_ns / 1e9:.0f} s after it was "
            "stored: it is forged, or a clock is wrong"
        )
    return event


class EvaluationReader:
    """Reads each evaluation once into `evaluations`. If the broker lost history, it reads all again."""

    def __init__(self, bus: Bus, run: str, revision: str, names: Iterable[str]) -> None:
        """`names`: environments that are evaluated; "*": all that were."""
        self.evaluations = EvaluationHistory.of()
        self._bus = bus
        self._next_seq = 1
        self._subjects = [subjects.event("eval", run, revision, name) for name in names]

    @property
    def reads(self) -> bool:
        """Whether the run has evaluations, or may have."""
        return bool(self._subjects)

    async def catch_up(self) -> list[EvalEvent]:
        """Return the evaluations stored since the last call. Waits for an unavailable server."""
        async with aclosing(self._read(follow=False)) as events:
            return [event async for event in events]

    async def follow(self) -> AsyncGenerator[EvalEvent, None]:
        """Yield evaluations as they come, until it is closed; at once where the run has none."""
        async with aclosing(self._read(follow=True)) as events:
            async for event in events:
                yield event

    async def _read(self, *, follow: bool) -> AsyncGenerator[EvalEvent, None]:
        while self._subjects:
            start = self._next_seq
            try:
                async with self._bus.read(subjects.EVENTS, self._subjects, start=start, follow=follow) as messages:
                    async for message in messages:
                        self._next_seq = message.seq + 1
                        try:
                            event = decode_evaluation(message)
                        except SchemaError:
                            continue  # another build's; `lachesis tail eval` shows its content
                        if self.evaluations.record(event):
                            yield event
            except HistoryLostError:
                if self._next_seq == 1:
                    raise
                self._next_seq = 1
            else:
                return
