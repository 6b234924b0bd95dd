"""Raises a notice that names the ranks that have not joined or no longer respond.

A rank that starts imports torch first, which takes a minute on a busy machine. So it is named only when it is later
than that, or at once if a signal has stopped its process.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import anyio

from lachesis.pipeline.common.process_state import STOPPED_STATES, process_state
from lachesis.pipeline.runtime.service import Service

__all__ = ["ALIVE_S", "AbsentRanks", "describe_absent", "report_absent_ranks"]

ALIVE_S = 1.0
"""Seconds between two signs of life of a rank."""
_STARTS_S = 60.0
"""Seconds after which a rank should have come."""
_SILENT_S = 8.0
_STOPPED_S = 3.0
"""The same for a rank whose process is known to be stopped."""
_MAX_NAMED = 8
_MEND = "look at its process and log; where it ends, all ranks start again from the newest checkpoint"


class AbsentRanks(NamedTuple):
    """Which ranks are away, why that may be, and what to do."""

    what: str
    why: str
    mend: str = _MEND


class HeardRanks(Protocol):
    """Rank 0's record of the others: when each was heard last (`time.monotonic`), how many there should be, and the
    pids of those that it started."""

    heard_s: dict[int, float]
    expected: int
    pids: dict[int, int]
    stopping: bool


def describe_absent(
    heard_s: Mapping[int, float], expected: int, began_s: float, now_s: float, stopped: Mapping[int, int] | None = None
) -> AbsentRanks | None:
    """Return which ranks from 1 on are away; None: none is. Pure.

    `stopped`: by rank, the pids of those that a signal stopped.
    """
    ranks, stopped = range(1, expected), stopped or {}
    away_s = {rank: now_s - heard_s.get(rank, began_s) for rank in ranks}
    if halted := [rank for rank in ranks if rank in stopped and away_s[rank] > _STOPPED_S]:
        pids = " ".join(str(stopped[rank]) for rank in halted[:_MAX_NAMED])
        why = f"a signal or a debugger stopped {'its process' if len(halted) == 1 else 'their processes'} {pids}"
        one, more = "is stopped", "are stopped"
        return AbsentRanks(_named(halted, one, more), why, f"`kill -CONT {pids}` lets {_it(halted)} go on")
    if missing := [rank for rank in ranks if rank not in heard_s and away_s[rank] > _STARTS_S]:
        absent = sum(rank not in heard_s for rank in ranks)
        why = f"{expected - absent} of {expected} are there; it starts, does not run, or cannot reach rank 0"
        return AbsentRanks(_named(missing, "has not come", "have not come"), why)
    if silent := [rank for rank in ranks if rank in heard_s and away_s[rank] > _SILENT_S]:
        longest_s = max(away_s[rank] for rank in silent)
        why = f"no sign of life for {longest_s:.0f} s: its process is stopped or hangs, or its machine is cut off"
        return AbsentRanks(_named(silent, "has fallen silent", "have fallen silent"), why)
    return None


def _named(ranks: list[int], one: str, more: str) -> str:
    numbers = ", ".join(map(str, ranks[:_MAX_NAMED])) + (" ..." if len(ranks) > _MAX_NAMED else "")
    return f"rank {numbers} of the trainer {one}" if len(ranks) == 1 else f"ranks {numbers} of the trainer {more}"


def _it(ranks: list[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


async def report_absent_ranks(service: Service, ranks: HeardRanks) -> None:
    """Keep the notice of ranks that are away. Runs until cancelled."""
    began_s = time.monotonic()
    while True:
        stopped = {rank: pid for rank, pid in ranks.pids.items() if process_state(pid) in STOPPED_STATES}
        found = describe_absent(ranks.heard_s, ranks.expected, began_s, time.monotonic(), stopped)
        if found is None or ranks.stopping:
            service.set_problem("absent ranks", None)
        else:
            service.set_problem(
                "absent ranks", found.what, why=found.why, mend=found.mend, held_up=["the next policy"], stops=True
            )
        await anyio.sleep(ALIVE_S)
