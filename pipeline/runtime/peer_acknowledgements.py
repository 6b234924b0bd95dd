"""Compares what services say was acknowledged to them with how far the streams go. Pure.

A service on another machine may be the only process that knows of a message; it says so in its heartbeats. Such a claim
is only as good as the key that made it, so it becomes a notice that names the service, and ends nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.runtime.stream_marks import BELIEVE_LOSS_S, describe_count
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.subjects import BUCKET, STREAMS

__all__ = ["PeerAcknowledgements"]

_FRESH_S = 10.0
_MAX_CLAIMS = 1024
_MAX_NAME = 64


@dataclass(slots=True)
class _Claim:
    seq: int
    place: str
    named_s: float
    """When this sequence was named first."""
    heard_s: float
    missed_s: float | None = None
    """Since when the stream ends before it."""


class PeerAcknowledgements:
    """The highest sequence of each stream that each service named last."""

    def __init__(self) -> None:
        self._claims: dict[tuple[str, str], _Claim] = {}

    def hear(self, beat: Heartbeat, now_s: float) -> None:
        """Take in a heartbeat."""
        for stream in {BUCKET, *STREAMS} & beat.acknowledged.keys():
            seq = beat.acknowledged[stream]
            known = self._claims.get((beat.service, stream))
            if known is None and len(self._claims) >= _MAX_CLAIMS:
                continue
            if known is None or now_s - known.heard_s > _FRESH_S or seq > known.seq:
                machine = beat.host[:_MAX_NAME] or "an unknown machine"
                place = f"{beat.service} (process {beat.pid} of {machine})"
                missed_s = known.missed_s if known is not None else None
                self._claims[beat.service, stream] = _Claim(seq, place, now_s, now_s, missed_s)
            elif seq == known.seq:
                known.heard_s = now_s

    def describe_lost(self, found: Mapping[str, StreamUsage], asked_s: float) -> str | None:
        """Return what services have missed for long enough in the streams, None if nothing.

        `found`: the streams, which were requested at `asked_s`. They may end before what was named later.
        """
        texts = []
        for (_, stream), claim in sorted(self._claims.items()):
            usage = found.get(stream)
            is_stale = claim.named_s > asked_s or asked_s - claim.heard_s > _FRESH_S
            if usage is None or claim.seq <= usage.last or is_stale:
                claim.missed_s = None
                continue
            claim.missed_s = asked_s if claim.missed_s is None else claim.missed_s
            if asked_s - claim.missed_s >= BELIEVE_LOSS_S:
                lost = describe_count(claim.seq - usage.last)
                texts.append(
                    f"{claim.place} says that sequence {claim.seq} of {stream} was acknowledged to it, and the stream "
                    f"ends at sequence {usage.last}: if that is so, {lost} gone"
                )
        return "; ".join(texts) or None
