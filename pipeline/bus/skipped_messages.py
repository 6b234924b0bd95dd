"""Finds stored messages to skip, because the service that owns their subject cannot use them.

Any holder of a service's key may write on its subjects, and a start takes what it finds there for the service's own: a
forged message would end it at every start. `lachesis runs recover` notes such messages in the retention record, and all
readers of a single writer's subject skip them, as they skip foreign messages.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.errors import DamagedError, NotFoundError
from lachesis.schemas import keys
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.retention import Retention

__all__ = ["NOTHING", "SkippedMessages", "read_noted", "read_skipped", "skipping"]

SkippedMessages = Mapping[str, Collection[int]]
"""By stream, the sequences of messages that are passed over."""
NOTHING: SkippedMessages = MappingProxyType({})

_further: ContextVar[SkippedMessages] = ContextVar("further", default=NOTHING)


@contextmanager
def skipping(further: SkippedMessages) -> Iterator[None]:
    """Pass `further` over as well, in what this task and the tasks that it starts read."""
    token = _further.set(_union(_further.get(), further))
    try:
        yield
    finally:
        _further.reset(token)


async def read_skipped(bus: Bus) -> SkippedMessages:
    """Return what is passed over: what a recovery noted, and what `skipping` says here."""
    return _union(await read_noted(bus), _further.get())


async def read_noted(bus: Bus) -> SkippedMessages:
    """Return what `lachesis runs recover` noted as left out; nothing where the record cannot be read."""
    try:
        entry = await bus.value(keys.RETENTION)
        return NOTHING if entry is None else decode(Retention, entry.value).left_out
    except (SchemaError, DamagedError, NotFoundError):
        return NOTHING


def _union(first: SkippedMessages, second: SkippedMessages) -> SkippedMessages:
    return {stream: {*first.get(stream, ()), *second.get(stream, ())} for stream in {*first, *second}}
