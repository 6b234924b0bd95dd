"""A copy of a run's streams in which somebody has changed something, unnoticed by the broker."""

from collections.abc import Callable

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.schemas.subjects import STREAMS

__all__ = ["copy_streams"]

_FILLERS = {stream: names[0].replace("*", "gone") for stream, names in STREAMS.items()}


async def copy_streams(source: Bus, target: Bus, alter: Callable[[StoredMessage], bytes]) -> int:
    """Store every message of `source` in `target` under its own sequence, with the data that `alter` makes of it.

    What was trimmed is filled up on an unused subject. Returns how many messages were changed.
    """
    changed = 0
    for stream, filler in _FILLERS.items():
        following = 1
        async with source.read(stream, [], follow=False) as messages:
            async for message in messages:
                for seq in range(following, message.seq):
                    await target.publish(filler, b"", msg_id=f"gone {stream} {seq}")
                data = alter(message)
                changed += data != message.data
                headers = {name: value for name, value in message.headers.items() if not name.startswith("Nats-")}
                ack = await target.publish(message.subject, data, msg_id=f"{stream} {message.seq}", headers=headers)
                assert ack.seq == message.seq
                following = message.seq + 1
    return changed
