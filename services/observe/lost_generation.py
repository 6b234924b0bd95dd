"""Adds up how much generation a run has lost and resumed, from heartbeats. Pure: no bus."""

from collections.abc import Iterable
from typing import Self

import msgspec

from lachesis.schemas.control import Heartbeat
from lachesis.services.output import human_seconds

__all__ = ["LostGeneration", "describe_lost_generation"]


class LostGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """Generation that was lost, in seconds of each sample, since the processes of the run started.

    A kill of an environment or a group that was given up loses generation. `groups`: those that were lost whole.
    `resumed_seconds` and `resumed_groups`: what went on in another process instead, because its calls are recorded.
    """

    seconds: float
    groups: int
    resumed_seconds: float
    resumed_groups: int

    @classmethod
    def of(cls, beats: Iterable[Heartbeat]) -> Self | None:
        """Return that of the newest heartbeat of each process; None if none of them counts it."""
        sums: dict[str, float] = {}
        for beat in beats:
            for name, value in beat.metrics.items():
                place, _, figure = name.rpartition("/")
                if place == "flow" or place.startswith("environment/"):
                    sums[figure] = sums.get(figure, 0.0) + value
        if "lost_seconds" not in sums:
            return None
        return cls(
            seconds=sums["lost_seconds"],
            groups=int(sums.get("lost_groups", 0)),
            resumed_seconds=sums.get("resumed_seconds", 0.0),
            resumed_groups=int(sums.get("resumed_groups", 0)),
        )


def describe_lost_generation(lost: LostGeneration | None) -> str:
    """Say how much generation was lost and resumed; empty if none was.

    A turn that was under way when its process was killed is not in it: none is left that knows how long it took.
    """
    if lost is None or not (lost.seconds or lost.groups or lost.resumed_groups):
        return ""
    seconds = human_seconds(lost.seconds) if lost.seconds else "nothing"
    resumed = human_seconds(lost.resumed_seconds) if lost.resumed_seconds else "nothing"
    return (
        f"of finished turns, adding up samples, since the environments' processes started: {seconds} lost, "
        f"{lost.groups} whole groups; {resumed} resumed after a kill, {lost.resumed_groups} groups"
    )
