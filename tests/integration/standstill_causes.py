"""Causes of standstill for the campaign of `standstill.py`, and how each is brought about and ended in a real run."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import anyio
import nats
import psutil
from integration.disk.conftest import SmallDisk
from integration.harness import Run
from integration.odd_server import OddServer
from nats.js import JetStreamContext

from lachesis.pipeline.bus.embedded import read_endpoint
from lachesis.schemas import subjects
from lachesis.services.run.connect import NATS_FOLDER

__all__ = ["CAUSES", "Cause", "StandingRun"]

_MAX_INODES = 100_000
"""Inodes of a disk that may be used up: more take long."""
_MANY_CONSUMERS = 520
_JUNK_BYTES = 4 << 20
_PTRACE_ATTACH, _PTRACE_DETACH, _ALL_CHILDREN = 16, 17, 0x40000000


@dataclass(frozen=True)
class StandingRun:
    """A run that causes are brought about in, and the stand-in before its policy's server."""

    run: Run
    odd: OddServer


BroughtAbout = Callable[[StandingRun], AbstractAsyncContextManager[None]]


class Cause(NamedTuple):
    """What holds while `brought_about` is open. `words`: of the line that tells of it."""

    name: str
    words: tuple[str, ...]
    brought_about: BroughtAbout
    is_brief: bool = False
    """Whether it ends the run before all commands could be looked at."""
    within_s: float = 10.0
    needs_disk: bool = False
    """Whether the run's folder must be a small disk of its own."""


@contextmanager
def _stopped_process(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _limited_process(pid: int, kind: int) -> Iterator[None]:
    before = resource.prlimit(pid, kind)
    limit = psutil.Process(pid).memory_info().vms if kind == resource.RLIMIT_AS else 8
    resource.prlimit(pid, kind, (limit, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, kind, before)


@contextmanager
def _debugged_process(pid: int) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_PTRACE_ATTACH, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), f"process {pid} cannot be debugged")
    os.waitpid(pid, _ALL_CHILDREN)
    try:
        yield
    finally:
        libc.ptrace(_PTRACE_DETACH, pid, None, None)


def _to_process(name: str, strike: Callable[[int], object]) -> BroughtAbout:
    """Return what opens the context manager `strike` of the process of that name."""

    @asynccontextmanager
    async def brought_about(standing: StandingRun) -> AsyncIterator[None]:
        with strike(standing.run.pids()[name]):  # type: ignore[attr-defined]
            yield

    return brought_about


def _switched(name: str) -> BroughtAbout:
    """Return what `standstill_switches.py` does while the switch of that name is on."""

    @asynccontextmanager
    async def brought_about(standing: StandingRun) -> AsyncIterator[None]:
        switch = standing.run.folder / "switches" / name
        switch.touch()
        try:
            yield
        finally:
            switch.unlink()

    return brought_about


def _answered_oddly(mode: str) -> BroughtAbout:
    """Return what the stand-in before the policy's server does in a mode (`odd_server.py`)."""

    @asynccontextmanager
    async def brought_about(standing: StandingRun) -> AsyncIterator[None]:
        standing.odd.mode = mode
        try:
            yield
        finally:
            standing.odd.mode = ""

    return brought_about


def _repeated(act: Callable[[Run], Awaitable[None]]) -> BroughtAbout:
    """Return what does `act` to the run again and again."""

    @asynccontextmanager
    async def brought_about(standing: StandingRun) -> AsyncIterator[None]:
        async def repeat() -> None:
            while True:
                await act(standing.run)
                await anyio.sleep(0.01)  # the processes struck offer nothing to wait on

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(repeat)
            yield
            tasks.cancel_scope.cancel()

    return brought_about


async def _cut_off_weights(run: Run) -> None:
    """Cut off each whole file of weights that the trainer has stored."""
    for path in (run.folder / "weights").glob("[!.]*.safetensors"):
        with suppress(FileNotFoundError):
            if path.stat().st_size > 1000:
                os.truncate(path, 1000)


async def _kill_inference(run: Run) -> None:
    with suppress(KeyError, ProcessLookupError):
        os.kill(run.pids()["inference-policy"], signal.SIGKILL)
    await anyio.sleep(0.5)


def _reconfigured(old: str, new: str) -> BroughtAbout:
    """Return what lets the server read its configuration with `new` in place of the line that begins with `old`."""

    @asynccontextmanager
    async def brought_about(standing: StandingRun) -> AsyncIterator[None]:
        file = standing.run.folder / NATS_FOLDER / "nats-server.conf"
        before = file.read_text()
        file.write_text("".join(new + "\n" if line.startswith(old) else line for line in before.splitlines(True)))
        os.kill(standing.run.pids()["nats-server"], signal.SIGHUP)
        try:
            yield
        finally:
            file.write_text(before)
            with suppress(KeyError, ProcessLookupError):
                os.kill(standing.run.pids()["nats-server"], signal.SIGHUP)

    return brought_about


@asynccontextmanager
async def _neighbour(run: Run) -> AsyncIterator[JetStreamContext]:
    """Connect to the run's server with the run's token, as a neighbour that has it."""
    endpoint = read_endpoint(run.folder / NATS_FOLDER)
    client = await nats.connect(endpoint.url, token=endpoint.token)
    try:
        yield client.jetstream(timeout=30)
    finally:
        await client.close()


@asynccontextmanager
async def _full_ledger(standing: StandingRun) -> AsyncIterator[None]:
    run = standing.run
    name = run.load_config().run
    subject, stream = f"rl.state.{name}.neighbour.live.0", subjects.stream_name(name, subjects.LEDGER)
    async with _neighbour(run) as js:
        with suppress(nats.js.errors.APIError):  # it is full
            while True:
                await js.publish(subject, bytes(_JUNK_BYTES))
        try:
            yield
        finally:
            await js.purge_stream(stream, subject=subject)


@asynccontextmanager
async def _many_consumers(standing: StandingRun) -> AsyncIterator[None]:
    run = standing.run
    stream = subjects.stream_name(run.load_config().run, subjects.EVENTS)
    names = [f"neighbour-{number}" for number in range(_MANY_CONSUMERS)]
    async with _neighbour(run) as js:
        for name in names:
            await js.add_consumer(stream, name=name, durable_name=name, filter_subject="rl.alert.>")
        try:
            yield
        finally:
            for name in names:
                await js.delete_consumer(stream, name)


@asynccontextmanager
async def _full_disk(standing: StandingRun) -> AsyncIterator[None]:
    disk = SmallDisk(standing.run.folder)
    disk.fill()
    try:
        yield
    finally:
        disk.free()


@asynccontextmanager
async def _no_inodes(standing: StandingRun) -> AsyncIterator[None]:
    folder = standing.run.folder / "small files"
    assert os.statvfs(standing.run.folder).f_favail < _MAX_INODES, "mount it with nr_inodes"
    folder.mkdir()
    made: list[Path] = []
    try:
        with suppress(OSError):
            while True:
                path = folder / str(len(made))
                path.touch()
                made.append(path)
        yield
    finally:
        for path in made:
            path.unlink()
        folder.rmdir()


@asynccontextmanager
async def _read_only_weights(standing: StandingRun) -> AsyncIterator[None]:
    folder = str(standing.run.folder / "weights")
    await anyio.run_process(["mount", "--bind", folder, folder])
    try:
        await anyio.run_process(["mount", "-o", "remount,ro,bind", folder])
        yield
    finally:
        await anyio.run_process(["umount", "-l", folder])


def _without_files(process: str) -> Cause:
    words = (process, "can open no more files", "ulimit -n")
    strike = _to_process(process, lambda pid: _limited_process(pid, resource.RLIMIT_NOFILE))
    return Cause(f"{process} has no file descriptors", words, strike)


def _without_memory(process: str) -> Cause:
    words = (process, "can have no more memory", "address space", "ulimit -v")
    strike = _to_process(process, lambda pid: _limited_process(pid, resource.RLIMIT_AS))
    return Cause(f"{process} has no memory", words, strike)


def _frozen(process: str) -> Cause:
    name = "nats-server does not answer" if process == "nats-server" else f"{process} is silent"
    strike = _to_process(process, _stopped_process)
    return Cause(f"SIGSTOP {process}", (name, "stopped", "kill -CONT"), strike)


def _odd(mode: str, *words: str) -> Cause:
    return Cause(f"the policy's server: {mode}", words, _answered_oddly(mode), within_s=15.0)


CAUSES = (
    *map(_frozen, ("batcher", "scorer", "governor", "trainer", "inference-policy", "environment-sums", "normalizer",
                   "teacher", "inference-teacher", "health", "curriculum", "evaluator", "nats-server")),
    Cause("a debugger holds the governor", ("governor is silent", "debugger", "kill -CONT"),
          _to_process("governor", _debugged_process)),
    Cause("a rater raises", ("scorer", "has a rating", "KeyError"), _switched("rater raises")),
    Cause("a rater ends its process", ("scorer ended", "code 3", "os._exit"), _switched("rater exits")),
    Cause("all rewards are equal", ("no group was fit", "zero_variance"), _switched("rewards are equal"),
          within_s=60.0),
    Cause("the environment raises", ("groups in a row failed", "no such column"), _switched("task raises"),
          is_brief=True),
    Cause("the environment's process ends", ("environment-sums ended", "code 1"), _switched("process ends"),
          is_brief=True),
    Cause("the environment calls sys.exit(8)", ("groups in a row failed", "SystemExit(8)"), _switched("rollout exits"),
          is_brief=True),
    Cause("no prompt fits", ("environment-sums", "leave no room for an answer"), _switched("prompts are long")),
    Cause("a rater hangs", ("scorer", "rater letters"), _switched("rater hangs")),
    Cause("a rater holds Python itself", ("scorer", "letters", "standstill_switches.py"),
          _switched("rater holds Python")),
    Cause("the environment hangs", ("environment-sums is busy in", "task"), _switched("task hangs"), within_s=12.0),
    Cause("a rollout hangs in a thread", ("groups under way hang", "see where its rollouts wait"),
          _switched("rollout hangs"), within_s=12.0),
    Cause("a rater rates NaN", ("scorer", "has a rating", "nan"), _switched("rater is nan")),
    *map(_without_files, ("supervisor", "environment-sums", "inference-policy")),
    *map(_without_memory, ("supervisor", "environment-sums", "inference-policy", "scorer")),
    _odd("html", "It begins '<html><body>502 Bad Gateway"),
    _odd("garbage ids", "none of the 101 the trainer knows"),
    _odd("nan", "something else than expected", "JSON is malformed"),
    _odd("version", "which this run's trainer has not published"),
    _odd("unknown model", "The model `policy` does not exist"),
    _odd("key refused", "this key is revoked"),
    _odd("hash", "has another tokenizer than the trainer: ffffffffffff"),
    _odd("engine", "ollama"),
    Cause("the policy's weights are cut off", ("inference-policy", "was refused", "it is cut off"),
          _repeated(_cut_off_weights), within_s=20.0),
    Cause("the folder of weights is read-only", ("trainer ended", "that file system is read-only"),
          _read_only_weights, within_s=20.0, needs_disk=True),
    Cause("the policy's server is killed again and again", ("inference-policy ended", "-9"),
          _repeated(_kill_inference)),
    Cause("the server refuses the run's credentials", ("nats-server refuses the run's credentials", "credentials of"),
          _reconfigured("authorization", 'authorization { token: "another" }')),
    Cause("the server takes small messages alone", ("nats-server", "max_payload", "2048"),
          _reconfigured("max_payload", "max_payload: 2048")),
    Cause("the ledger's stream is full", ("LEDGER", "no new leases are granted", "streams.ledger_bytes"),
          _full_ledger, within_s=15.0),
    Cause("a stream has very many consumers", ("consumers of", "EVENTS", "a run has some dozens"), _many_consumers,
          within_s=15.0),
    Cause("the disk is full", ("the disk that holds", "is full", "make room"), _full_disk, needs_disk=True),
    Cause("the disk has no inodes", ("the disk is full", "no inode is free"), _no_inodes, needs_disk=True),
)  # fmt: skip
