"""Finds the stage that limits the run. Pure.

A run is a loop with a bounded number of groups in it: leases hold back the environments once enough is under way. So
waiting upstream says little: whichever stage is slow, a full window makes every environment wait (backpressure) and
every stage behind the slow one idle. The signs are where work is done all the time, and where the groups are:

1. A stage that the groups need and that is not there (stale, silent, or waiting for something that is down) stops all.
2. A stage whose slots are at work all the time cannot go faster: the most loaded limits the rate. Of several, the one
   with the most groups at it, for a queue grows in front of the slowest.
3. If nothing is at work all the time, the window limits: rate = groups in the window / time around the loop, and by
   Little's law a stage holds groups in proportion to the time spent there. So it is the stage that holds the most.
"""

from collections.abc import Mapping, Sequence

import msgspec

from lachesis.services.observe.window import StageRow

__all__ = ["Bottleneck", "find_bottleneck"]

SATURATED_SHARE = 0.9
"""Load from which a stage is at work all the time."""
_DOWN_STATES = {"stale", "silent", "waiting"}
_REQUIRED_SERVICES = ("environment", "scorer", "teacher", "normalizer", "batcher", "trainer")
_SERVES = {"environment": "inference-policy", "teacher": "inference-teacher"}


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """`service` limits the run; `reason` says why it is thought so, in words."""

    service: str
    reason: str


def find_bottleneck(rows: Sequence[StageRow], flow: Mapping[str, float]) -> Bottleneck | None:
    """Return what limits the run, None where nothing is under way.

    `flow`: the governor's figures, empty if unknown.
    """
    by_name = {row.service: row for row in rows}
    governor = by_name.get("governor")
    if governor is not None and governor.state in {"stale", "silent"}:
        return Bottleneck(service="governor", reason=f"is {governor.state}: without it nothing is generated")
    stages = [row for row in rows if row.service.partition("-")[0] in _REQUIRED_SERVICES]
    missed = _down(stages, flow)
    if missed is not None:
        return missed
    found = _busy(stages) or _fullest(stages)
    if found is None:
        return _held_back(stages)
    server = by_name.get(_SERVES.get(found.service.partition("-")[0], ""))
    if server is None or server.state in _DOWN_STATES:
        return found
    running, queued = server.in_flight or 0, server.lag or 0
    serves = f"has {running} requests running, {queued} queued" if running or queued else "is idle at the moment"
    return Bottleneck(service=found.service, reason=f"{found.reason}; {server.service} {serves}")


def _down(stages: Sequence[StageRow], flow: Mapping[str, float]) -> Bottleneck | None:
    for row in stages:
        if row.state in _DOWN_STATES and _is_missed(row, stages, flow):
            why = f": {row.notes[0]}" if row.notes else ""
            return Bottleneck(service=row.service, reason=f"is {row.state}{why}")
    return None


def _is_missed(row: StageRow, stages: Sequence[StageRow], flow: Mapping[str, float]) -> bool:
    """Whether groups wait for a stage that is not there."""
    match row.service.partition("-")[0]:
        case "environment":  # the others have nothing left to do but fill a batch
            others = [other for other in stages if other.service.startswith("environment")]
            idle = flow.get("flow/untrained", 0) == 0 and _busy(stages) is None
            return idle and all(other.state in _DOWN_STATES for other in others)
        case "trainer":  # a trainer that sends no heartbeats may work elsewhere
            return 2 * flow.get("flow/untrained", 0) > flow.get("flow/outstanding", 0)
        case "scorer" | "teacher" if row.lag is not None:
            return row.lag > 0
    return flow.get("flow/accepted", 0) > 0


def _busy(stages: Sequence[StageRow]) -> Bottleneck | None:
    saturated = [row for row in stages if row.load is not None and row.load >= SATURATED_SHARE]
    if not saturated:
        return None
    row = max(saturated, key=lambda row: row.held or 0.0)
    times = "" if row.process.p50 is None else f", {row.process.p50:.3g} s each time (p50)"
    return Bottleneck(service=row.service, reason=f"is at work {100 * (row.load or 0):.0f} % of the time{times}")


def _held_back(stages: Sequence[StageRow]) -> Bottleneck | None:
    """With nothing under way, an environment that gets no lease waits for no stage; its note says for what."""
    for row in stages:
        if row.service.startswith("environment") and row.state == "backpressure" and row.notes:
            return Bottleneck(service=row.service, reason=f"is held back: {row.notes[0]}")
    return None


def _fullest(stages: Sequence[StageRow]) -> Bottleneck | None:
    held = sum(row.held or 0.0 for row in stages)
    if held <= 0:
        return None
    row = max(stages, key=lambda row: row.held or 0.0)
    share = 100 * (row.held or 0) / held
    return Bottleneck(service=row.service, reason=f"holds {row.held:.1f} groups on average, {share:.0f} % of all")
