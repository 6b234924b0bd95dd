"""Raises a notice that names the ranks that have not joined or no longer respond."""

import time
from collections.abc import Mapping
from typing import Protocol

import anyio

from lachesis.pipeline.runtime.service import Service

__all__ = ["ALIVE_S", "describe_absent", "tell_absent"]

ALIVE_S = 1.0
"""Seconds between two signs of life of a rank."""
_SILENT_S = 5.0
_MAX_NAMED = 8


class HeardRanks(Protocol):
    """Rank 0's record of the others: when each was heard last (`time.monotonic`), and how many there should be."""

    heard_s: dict[int, float]
    expected: int
    stopping: bool


def describe_absent(
    heard_s: Mapping[int, float], expected: int, began_s: float, now_s: float
) -> tuple[str, str] | None:
    """Return which ranks from 1 on are away, and why that may be; None: all are heard. Pure."""
    if now_s - began_s <= _SILENT_S:
        return None
    missing = [rank for rank in range(1, expected) if rank not in heard_s]
    silent = [rank for rank in range(1, expected) if now_s - heard_s.get(rank, now_s) > _SILENT_S]
    if not missing and not silent:
        return None
    named, verb = (missing, "not come") if missing else (silent, "fallen silent")
    numbers = ", ".join(map(str, named[:_MAX_NAMED])) + (" ..." if len(named) > _MAX_NAMED else "")
    which = f"rank {numbers} of the trainer has" if len(named) == 1 else f"ranks {numbers} of the trainer have"
    if missing:
        why = f"{expected - len(missing)} of {expected} are there; it starts, does not run, or cannot reach rank 0"
        return f"{which} {verb}", why
    away_s = max(now_s - heard_s[rank] for rank in silent)
    return (
        f"{which} {verb}",
        f"no sign of life for {away_s:.0f} s: its process is stopped or hangs, or its machine is cut off",
    )


async def tell_absent(service: Service, ranks: HeardRanks) -> None:
    """Keep the notice of ranks that are away. Runs until cancelled."""
    began_s = time.monotonic()
    while True:
        found = describe_absent(ranks.heard_s, ranks.expected, began_s, time.monotonic())
        if found is None or ranks.stopping:
            service.set_problem("absent ranks", None)
        else:
            what, why = found
            service.set_problem(
                "absent ranks", what, why=why, held_up=["the next policy"], stops=True,
                mend="look at its process and log; where it ends, all ranks start again from the newest checkpoint",
            )  # fmt: skip
        await anyio.sleep(ALIVE_S)
