"""A replay's worker: a process that reads and scores the rollouts that it is given.

`worker_pool` starts it as `python -m lachesis.pipeline.offline.replay.worker PID`, with the pid of the replay. It gets
requests on its standard input and answers on its standard output. It ends with its standard input, and with the
replay's process, busy or not. It ignores signals to end: the replay heeds them, and lets the worker finish what it
holds.
"""

import logging
import os
import signal
import sys
import time
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import BinaryIO

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.window import InFlightWindow
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.child_process import die_with_parent
from lachesis.pipeline.common.stop_signals import stop_signals
from lachesis.pipeline.errors import leaves
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
from lachesis.pipeline.offline.replay.inflight import MAX_IN_FLIGHT_BYTES, CooperativeYield
from lachesis.pipeline.offline.replay.outage import retrying
from lachesis.pipeline.offline.replay.scoring import ReplayScorer, ScoreOrReason, collect_seldom
from lachesis.pipeline.offline.replay.selected import fetched
from lachesis.schemas.errors import ConfigError, LachesisError

_starts = msgspec.msgpack.Decoder(WorkerStart)
_blocks = msgspec.msgpack.Decoder(RolloutBlock)


def main() -> None:
    """Work until the standard input ends."""
    arm = die_with_parent(signal.SIGKILL, parent=int(sys.argv[1]))
    if arm is not None:
        arm()
    for number in stop_signals():
        signal.signal(number, lambda *_: None)  # not ignored: what a rater starts would ignore it too
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(levelname)s replay worker %(process)d %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stdin_fd, stdout_fd = os.dup(sys.stdin.fileno()), os.dup(sys.stdout.fileno())
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a rater prints is no answer
    collect_seldom()
    with os.fdopen(stdout_fd, "wb") as out:
        anyio.run(_work, stdin_fd, out)


class _Pipe(anyio.abc.ByteReceiveStream):
    """The end of a pipe that is read from."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.wait_readable(self._descriptor)
        data = os.read(self._descriptor, max_bytes)
        if not data:
            raise anyio.EndOfStream
        return data

    async def aclose(self) -> None:
        os.close(self._descriptor)


async def _work(stdin_fd: int, out: BinaryIO) -> None:
    async with BufferedByteReceiveStream(_Pipe(stdin_fd)) as stream:
        start = await read_frame(stream, _starts)
        if start is None:
            return
        server, token = start.connection
        try:
            scorer, run = _load_scorer(start), start.run_config.run
            async with (
                await connect(run=run, name=f"{run}.replay", config=server, token=token) as bus,
                background() as tasks,
            ):
                tasks.start_soon(bus.keep_served)
                worker = _WorkerProcess(bus, run, scorer, out)
                _send(out, WorkerReady())
                while (block := await read_frame(stream, _blocks)) is not None:
                    tasks.start_soon(worker.answer, block)
        except LachesisError as error:
            _send(out, _failed(None, error))


def _load_scorer(start: WorkerStart) -> ReplayScorer:
    sys.path[:] = start.path
    scorer = ReplayScorer(start.run_config, start.ensembles, retrying)
    for env, one in scorer.scorers.items():
        if one.digest != start.ensembles[env]:
            raise ConfigError(f"environment {env}: its raters changed while the replay was started; start it again")
    return scorer


def _send(out: BinaryIO, answer: WorkerAnswer) -> None:
    """Send an answer. It blocks while the pipe is full: the replay takes in whatever comes."""
    out.write(frame(answer))
    out.flush()


def _failed(number: int | None, error: LachesisError) -> WorkerError:
    return WorkerError(number, type(error).__name__, str(error))


class _WorkerProcess:
    def __init__(self, bus: Bus, run: str, scorer: ReplayScorer, out: BinaryIO) -> None:
        self._bus = bus
        self._run = run
        self._scorer = scorer
        self._out = out
        self._window = InFlightWindow(MAX_IN_FLIGHT_BYTES, sys.maxsize)
        self._one_block = anyio.Lock()  # blocks that wait for nothing are scored one after the other
        self._turns = CooperativeYield()

    async def answer(self, block: RolloutBlock) -> None:
        """Score a block and send its verdicts, or why there are none."""
        try:
            reply = await self._scored_block(block)
        except (LachesisError, BaseExceptionGroup) as error:
            found = leaves(error)
            if not isinstance(found[0], LachesisError):
                raise  # a bug, which ends this process
            _send(self._out, _failed(block.number, found[0]))
        else:
            _send(self._out, reply)

    async def _scored_block(self, block: RolloutBlock) -> WorkerReply:
        wanted, verdicts = block.wanted, dict[int, ScoreOrReason]()

        async def score(i: int, message: StoredMessage) -> None:
            verdicts[i] = await self._scorer.score_rollout(wanted[i].env, message)
            self._window.release(len(message.data))

        async with (
            anyio.create_task_group() as scoring,
            aclosing(fetched(self._bus, self._run, wanted)) as messages,
            AsyncExitStack() as stack,
        ):
            message = await anext(messages)  # so that the others come while another block is scored
            if not self._scorer.is_asynchronous(wanted[0].env):
                await stack.enter_async_context(self._one_block)
            began = time.monotonic()
            for i, found in enumerate(wanted):
                if i:
                    message = await anext(messages)
                await self._window.enter(len(message.data))
                if self._scorer.is_asynchronous(found.env):
                    scoring.start_soon(score, i, message)
                else:
                    await score(i, message)
                    await self._turns.give()
        return WorkerReply(block.number, [verdicts[i] for i in range(len(wanted))], time.monotonic() - began)


if __name__ == "__main__":
    main()
