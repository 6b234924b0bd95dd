"""What a run must not leave behind: processes, consumers, chunks of messages that were never finished, leases."""

import os
from collections.abc import Collection
from pathlib import Path

import psutil
from chaos.history import History

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas import subjects

__all__ = ["chunks", "consumers", "leases", "processes"]

_INACTIVE_S = 30


def processes(folder: Path, spared: Collection[int]) -> list[psutil.Process]:
    """Return what was started on the run in `folder` and still runs, by what the command lines say."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        mine = str(folder) in " ".join(process.info["cmdline"] or ()) and process.info["status"] != "zombie"
        if mine and process.pid not in {os.getpid(), *spared}:
            found.append(process)
    return found


async def consumers(bus: NatsBus, run: str) -> list[str]:
    """Consumers without an owner: all but the stages' durable ones and readers that the server soon forgets."""
    known = {subjects.durable(stage, run, subjects.LIVE) for stage in ("scorer", "teacher")}
    found = []
    for stream in subjects.STREAMS:
        for info in await bus.client.jetstream().consumers_info(subjects.stream_name(run, stream)):
            passing = info.config.inactive_threshold is not None and info.config.inactive_threshold <= _INACTIVE_S
            if info.name not in known and not passing:
                found.append(f"consumer {info.name} of {stream} belongs to nobody")
    return found


def chunks(history: History) -> list[str]:
    """Chunks that no large message refers to, and large messages without their chunks."""
    found = [f"{subject}: chunks of no message" for subject in sorted(history.chunks - history.heads)]
    return found + [f"{subject}: the chunks are gone" for subject in sorted(history.heads - history.chunks)]


def leases(metrics: dict[str, float] | None) -> list[str]:
    """Leases that the governor still counts, by its last heartbeat, when their producers have been silent for long."""
    if metrics is None:
        return ["the governor says nothing"]
    leased = metrics.get("flow/leased")
    return [f"{leased} sequences are leased to nobody"] if leased else []
