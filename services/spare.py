"""Warm spares: processes that have imported what a service imports and wait to be told which service they are.

A service that dies is away for as long as its next life imports packages: most of its recovery, and seconds where torch
is among them. A spare has that behind it. There are those with torch and, far smaller, those without. A spare is told
what to be, and where to log, by one line of JSON on its standard input, which from then on is what it is for every
supervised process: once it ends, the supervisor is gone. What it has imported is as old as it is: the supervisor renews
the spares once a process was drained to take up another build.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import anyio
import anyio.abc
import msgspec

from lachesis.services.registry import SERVICES, load_main

__all__ = ["PRELOADED", "Spares", "Told", "open_supervised", "wait_to_be_told"]

log = logging.getLogger("lachesis")

PRELOADED = {
    "plain": tuple(spec.name for spec in SERVICES.values() if spec.extra is None),
    "torch": tuple(spec.name for spec in SERVICES.values() if spec.extra == "train"),
}
"""The kinds of spares, each with the services that it can become."""
_AGAIN_S = 5.0
_LONGEST_LINE = 1 << 16


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a spare is to be, and the file that its output goes to."""

    service: str
    part: str
    replica: int
    log: str


def wait_to_be_told(kind: str) -> Told | None:
    """Import what the services of that kind import, wait, and return what is told; None: the supervisor is gone."""
    for name in PRELOADED[kind]:
        load_main(SERVICES[name])
    line = _read_line(sys.stdin.fileno())
    if line is None:
        return None
    told = msgspec.json.decode(line, type=Told)
    sink = os.open(told.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(sink, sys.stdout.fileno())
    os.dup2(sink, sys.stderr.fileno())
    os.close(sink)
    return told


def _read_line(descriptor: int) -> bytes | None:
    """Read to the end of a line and not a byte further; None when the input ends before it does."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte or len(line) > _LONGEST_LINE:
            return None
        line += byte
    return line


@dataclass(eq=False)
class _Spare:
    kind: str
    process: anyio.abc.Process
    is_old: bool = False
    taken: anyio.Event = field(default_factory=anyio.Event)


class Spares:
    """Keeps `count` spares waiting of each kind that can become one of `services`.

    `arguments` (--config, --set) are those of every process of the run.
    """

    def __init__(self, arguments: Sequence[str], services: Collection[str], count: int, logs: Path) -> None:
        self._arguments = list(arguments)
        self._kinds = [kind for kind, becomes in PRELOADED.items() if set(becomes) & set(services)] * count
        self._logs = logs
        self._idle: list[_Spare] = []

    async def keep(self) -> None:
        """Start a spare whenever one is missing, until cancelled, which ends those that wait."""
        async with anyio.create_task_group() as tasks:
            for kind in self._kinds:
                tasks.start_soon(self._keep_one, kind)

    async def take(self, told: Told) -> anyio.abc.Process | None:
        """Let the spare that has waited longest be what it is told, and return its process; None when there is none."""
        while (spare := self._longest_idle(told.service)) is not None:
            self._idle.remove(spare)
            spare.taken.set()
            told_by = cast("anyio.abc.ByteSendStream", spare.process.stdin)
            try:
                with anyio.CancelScope(shield=True):  # taken, it is the caller's, whatever happens
                    await told_by.send(msgspec.json.encode(told) + b"\n")
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                await _end(spare.process)  # it has just died
                continue
            return spare.process
        return None

    def _longest_idle(self, service: str) -> _Spare | None:
        return next((spare for spare in self._idle if service in PRELOADED[spare.kind]), None)

    def renew(self) -> None:
        """End the spares that wait now; others, which import everything anew, take their place."""
        for spare in self._idle:
            spare.is_old = True
            if spare.process.returncode is None:
                spare.process.kill()
        self._idle.clear()

    async def _keep_one(self, kind: str) -> None:
        while True:
            spare = await self._start(kind)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._wait_for_its_end, spare, tasks.cancel_scope)
                    await spare.taken.wait()
                    tasks.cancel_scope.cancel()
            finally:
                if not spare.taken.is_set():
                    if not spare.is_old:
                        self._idle.remove(spare)
                    await _end(spare.process)
            if not (spare.taken.is_set() or spare.is_old):
                log.warning("a spare ended with code %s; see %s", spare.process.returncode, self._logs / "spare.log")
                await anyio.sleep(_AGAIN_S)

    async def _start(self, kind: str) -> _Spare:
        command = [sys.executable, "-m", "lachesis", "spare", kind, *self._arguments]
        with anyio.CancelScope(shield=True):
            process = await open_supervised(command, self._logs / "spare.log")
        spare = _Spare(kind, process)
        self._idle.append(spare)
        return spare

    async def _wait_for_its_end(self, spare: _Spare, scope: anyio.CancelScope) -> None:
        await spare.process.wait()
        scope.cancel()


async def open_supervised(command: Sequence[str], file: Path) -> anyio.abc.Process:
    """Start a process that logs to `file`. The end of its standard input tells it that the supervisor is gone."""
    with file.open("ab") as sink:
        return await anyio.open_process(
            command, stdin=subprocess.PIPE, stdout=sink, stderr=sink, start_new_session=True
        )


async def _end(process: anyio.abc.Process) -> None:
    """Kill a spare, which holds nothing, and wait for it."""
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            process.kill()
        await process.aclose()
