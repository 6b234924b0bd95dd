"""Marks of a run's store: how far each stream went, kept where the loss of a stream does not reach.

They lie in the bucket, in LEDGER and in the run's folder. So if two streams, or a stream and the bucket, do not fit
each other, the marks name one of them.
"""

from lachesis.schemas.annotations import StreamMark
from lachesis.schemas.codec import Event
from lachesis.schemas.values import Count

__all__ = ["StoreMarks"]


class StoreMarks(Event, frozen=True, kw_only=True):
    """`ends`: the last message of each stream, and of the bucket, by stream; none where nothing was ever stored.

    `count` rises with each of them. `rollout`: the newest rollout that the governor had read, whose loss is never
    trimming. `trimmed`: as in the retention record at that time. `keys`: those that the bucket held a little before.
    """

    run: str
    count: Count
    written_ns: Count
    ends: dict[str, StreamMark]
    rollout: StreamMark | None = None
    trimmed: dict[str, Count] = {}
    keys: list[str] = []
