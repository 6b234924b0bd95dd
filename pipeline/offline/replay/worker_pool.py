"""Runs the workers of a replay: sends them rollouts to score, and receives their verdicts.

Each worker is a process (`worker`) with its own connection, and reads the rollouts that it scores: no payload comes
through here. Guarantees:

* a worker that dies is replaced, and its unanswered rollouts are scored again elsewhere; if several die in turn of the
  same rollouts, or before they are ready, that is an error which says so;
* an error that a worker meets is raised here as if it had been met here;
* no worker outlives the context, or this process.
"""

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import cast

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from lachesis.pipeline import errors
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.offline.replay.frames import (
    RolloutBlock,
    WorkerAnswer,
    WorkerError,
    WorkerReady,
    WorkerReply,
    WorkerStart,
    frame,
    read_frame,
)
from lachesis.pipeline.offline.replay.selected import SelectedRollout
from lachesis.schemas import errors as wire_errors
from lachesis.schemas.errors import LachesisError

__all__ = ["WorkerPool", "open_workers"]

log = logging.getLogger("lachesis")

_COMMAND = [sys.executable, "-P", "-m", "lachesis.pipeline.offline.replay.worker"]
_MAX_DEATHS = 5
"""Workers that may end, one after the other, without an answer, or over the same rollouts."""

_answers = msgspec.msgpack.Decoder(WorkerAnswer)


class _DiedError(Exception):
    """Raised when a worker ends before it has answered."""


@asynccontextmanager
async def open_workers(start: WorkerStart, count: int) -> AsyncIterator["WorkerPool"]:
    """Yield `count` workers, which may not be ready yet.

    The body is cancelled, and raises what a worker says, where one cannot start.
    """
    workers = [_WorkerClient(start) for _ in range(count)]
    async with background() as tasks:
        for worker in workers:
            tasks.start_soon(worker.run)
        yield WorkerPool(workers)


class WorkerPool:
    """See the module's docstring; made by `open_workers`."""

    def __init__(self, workers: "Sequence[_WorkerClient]") -> None:
        self._workers = workers

    async def score_block(self, wanted: Sequence[SelectedRollout]) -> WorkerReply:
        """Return what becomes of each of `wanted`.

        Raises `NotFoundError` when one is gone, `InfrastructureError` where an outage lasts too long.
        """
        for _ in range(_MAX_DEATHS):
            worker = min(self._workers, key=lambda one: (not one.is_ready, one.pending_blocks))
            try:
                return await worker.score_block(wanted)
            except _DiedError:
                continue
        raise InfrastructureError(
            f"{_MAX_DEATHS} workers died, one after the other, while they scored the rollouts from sequence "
            f"{wanted[0].seq} to {wanted[-1].seq}: see above what they said, or the kernel's log where memory was short"
        )


@dataclass(slots=True, eq=False)
class _PendingBlock:
    """A block that was sent to a worker. No answer: the worker died."""

    answer: WorkerReply | WorkerError | None = None
    done: anyio.Event = field(default_factory=anyio.Event)

    def end(self, answer: WorkerReply | WorkerError | None) -> None:
        self.answer = answer
        self.done.set()


class _WorkerClient:
    """One worker through all its lives."""

    def __init__(self, start: WorkerStart) -> None:
        self.pending_blocks = 0
        """Blocks that are not answered."""
        self._start = frame(start)
        self._numbers = itertools.count()
        self._blocks: dict[int, _PendingBlock] = {}
        self._sending = anyio.Lock()
        self._stdin: anyio.abc.ByteSendStream | None = None
        self._ready = anyio.Event()

    @property
    def is_ready(self) -> bool:
        return self._stdin is not None

    async def score_block(self, wanted: Sequence[SelectedRollout]) -> WorkerReply:
        """Return the verdicts. Raises what the worker met, `_DiedError` where it ended first."""
        number, pending = next(self._numbers), _PendingBlock()
        self.pending_blocks += 1
        try:
            while self._stdin is None:
                await self._ready.wait()
            self._blocks[number] = pending
            async with self._sending:
                await self._stdin.send(frame(RolloutBlock(number, list(wanted))))
            await pending.done.wait()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise _DiedError from error
        finally:
            self.pending_blocks -= 1
            self._blocks.pop(number, None)
        if isinstance(pending.answer, WorkerError):
            raise _met(pending.answer)
        if pending.answer is None:
            raise _DiedError
        return pending.answer

    async def run(self) -> None:
        """Keep a process alive until cancelled. Raises what it says where it cannot start, `InfrastructureError` when
        one after the other ends without an answer."""
        fruitless = 0
        while fruitless < _MAX_DEATHS:
            with anyio.CancelScope(shield=True):
                process = await anyio.open_process(
                    [*_COMMAND, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None
                )
            async with process:  # killed where this is cancelled
                answered = await self._live(process)
            fruitless = 0 if answered else fruitless + 1
            log.warning("a worker of the replay ended with code %s: another takes its place", process.returncode)
        raise InfrastructureError(
            f"{_MAX_DEATHS} workers ended, one after the other, before they had scored anything, the last one with "
            f"code {process.returncode}: see above what they said"
        )

    async def _live(self, process: anyio.abc.Process) -> bool:
        """Talk with a process until it ends, and return whether it scored anything."""
        stdin, stdout = (
            cast("anyio.abc.ByteSendStream", process.stdin),
            cast("anyio.abc.ByteReceiveStream", process.stdout),
        )
        with suppress(anyio.BrokenResourceError):
            await stdin.send(self._start)
        answered = False
        answers = BufferedByteReceiveStream(stdout)
        while (answer := await read_frame(answers, _answers)) is not None:
            if isinstance(answer, WorkerReady):
                self._stdin = stdin
                self._ready.set()
            elif answer.number is None:
                raise _met(answer)
            elif answer.number in self._blocks:
                answered = True
                self._blocks[answer.number].end(answer)
        self._stdin = None
        if self._ready.is_set():  # what waits for the first one waits for this event
            self._ready = anyio.Event()
        for pending in self._blocks.values():
            pending.end(None)
        return answered


def _met(failed: WorkerError) -> LachesisError:
    """Return the error that a worker met."""
    known = vars(wire_errors) | vars(errors)
    kind: type[LachesisError] = known.get(failed.error, InfrastructureError)
    return kind(failed.text)
