"""The process above a service: whatever the service started ends with it, and nothing else does."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from lachesis.services.process.reaper import ReaperStarted, ServiceEnded

pytestmark = [pytest.mark.timeout(60), pytest.mark.outside]

_SERVICE = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path
from lachesis.services.process.reaper import start_below_reaper

start_below_reaper(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]), "reaper")
folder = Path(sys.argv[3])

def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "600"])
        os._exit(0)
    os.wait()

def stubborn():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    with_it = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    with_it.stdout.readline()

def brief():
    if os.fork() == 0:
        os.spawnlp(os.P_NOWAIT, "true", "true")
        os._exit(0)
    os.wait()

for what in sys.argv[4].split():
    {"daemon": daemon, "stubborn": stubborn, "brief": brief,
     "child": lambda: subprocess.Popen(["sleep", "600"])}[what]()
(folder / "ready").write_text("")
exec(sys.argv[5])
"""


class _Started:
    def __init__(self, process: "subprocess.Popen[bytes]", channel: socket.socket) -> None:
        self.process = process
        self.channel = channel
        data, (pidfd,), _, _ = socket.recv_fds(channel, 4096, 1)
        os.close(pidfd)
        self.first = msgspec.json.decode(data, type=ReaperStarted)
        self.service = psutil.Process(self.first.pid)

    def last(self) -> ServiceEnded | None:
        data = self.channel.recv(4096)
        return msgspec.json.decode(data, type=ServiceEnded) if data else None

    def below(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.first.reaper).children(recursive=True)
        return found


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


@contextmanager
def started(folder: Path, what: str, then: str = "time.sleep(600)", limit_s: float = 60.0) -> Iterator[_Started]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", _SERVICE, str(theirs.fileno()), str(limit_s), str(folder), what, then]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=said)
    theirs.close()
    begun = _Started(process, ours)
    try:
        until((folder / "ready").exists)
        yield begun
    finally:
        ours.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize("end", ["exits", "killed"])
def test_nothing_that_a_service_started_is_alive_once_its_end_is_said(tmp_path: Path, end: str) -> None:
    with subprocess.Popen(["sleep", "600"]) as stranger:
        with started(tmp_path, "daemon child stubborn") as run:
            below = run.below()
            assert len(below) == 4
            run.service.send_signal(signal.SIGTERM if end == "exits" else signal.SIGKILL)
            assert run.last() == ServiceEnded(-15 if end == "exits" else -9)
            assert not [one for one in below if one.is_running()]
            run.process.wait()
            assert "ended 3 processes that it had left behind" in (tmp_path / "said").read_text()
        assert stranger.poll() is None
        stranger.kill()


def test_the_exit_code_of_a_service_is_said(tmp_path: Path) -> None:
    with started(tmp_path, "", "sys.exit(7)") as run:
        assert run.last() == ServiceEnded(7)


def test_what_a_living_service_started_lives_and_orphans_that_end_are_reaped(tmp_path: Path) -> None:
    with started(tmp_path, "daemon brief brief") as run:
        until(lambda: len(run.below()) == 2)
        assert {one.status() for one in run.below()} <= {psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING}


def test_a_service_that_is_stopped_does_not_outlive_its_supervisor_for_long(tmp_path: Path) -> None:
    with started(tmp_path, "daemon", limit_s=0.05) as run:
        below = run.below()
        run.service.suspend()
        run.channel.close()
        run.process.wait()
        assert not [one for one in below if one.is_running()]


def test_a_service_ends_with_its_reaper(tmp_path: Path) -> None:
    with started(tmp_path, "") as run:
        psutil.Process(run.first.reaper).kill()
        assert run.last() is None
        psutil.wait_procs([run.service])
