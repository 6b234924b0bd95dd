"""Opens torch's process group among the ranks, and ends this process if a collective hangs.

Collectives on a CPU go over gloo, those on GPUs over NCCL, or over gloo too if the settings say so. A call that waits
in NCCL for a lost rank cannot be cancelled, so the process ends without waiting for it. Nothing is lost, since durable
files are written in one piece.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import anyio.to_thread
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lachesis.pipeline.runtime.exit_note import note_exit
from lachesis.pipeline.trainer.collectives import Ranks, raise_rank_lost
from lachesis.pipeline.trainer.ranks.place import RankPlace

__all__ = ["GRACE_S", "end_process", "end_process_after", "in_thread", "meet", "open_process_group"]

log = logging.getLogger("lachesis")

GRACE_S = 3.0
"""Seconds that a collective has to fail by itself once a rank has gone."""

T = TypeVar("T")


def meet(place: RankPlace, timeout_s: float) -> Any:
    """Return the store that all ranks share, as soon as rank 0 has opened it."""
    separator = "&" if "?" in place.meets_at else "?"
    url = f"{place.meets_at}{separator}rank={place.rank}&world_size={place.size}"
    store, _, _ = next(iter(rendezvous(url, timeout=timedelta(seconds=timeout_s))))
    return store


def open_process_group(
    store: Any, place: RankPlace, device: torch.device, timeout_s: float, collectives: str = "auto"
) -> Ranks:
    """Join the process group; returns once all ranks have. `collectives`: see `training.collectives`."""
    if device.type == "cuda" and device.index is not None:  # else it is the current one
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" and collectives == "auto" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout_s),
    )
    return Ranks(place.rank, place.size)


async def in_thread(ranks: Ranks, call: Callable[..., T], *arguments: Any) -> T:
    """Call what takes part in collectives. Raises `RankLostError` where another rank has gone."""

    def guarded() -> T:
        with raise_rank_lost(ranks):
            return call(*arguments)

    return await anyio.to_thread.run_sync(guarded)


def end_process(code: int) -> None:
    """End this process at once, its output written."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    note_exit(code)
    os._exit(code)


def end_process_after(seconds: float, code: int) -> None:
    """End this process after so long, unless it has ended by then."""
    timer = threading.Timer(seconds, end_process, [code])
    timer.daemon = True
    timer.start()
