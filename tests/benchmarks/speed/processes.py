"""Processes of a benchmark: started, read from /proc, and ended by their ids, or with the benchmark."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from speed.figures import Snapshot

__all__ = ["BENCHMARKS", "TREE", "Processes", "by_service", "descendants", "snapshot"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_END_S = 15.0
BENCHMARKS = Path(__file__).parents[1]
TREE = BENCHMARKS.parents[1]


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, which may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def snapshot(pids: Mapping[str, int | Iterable[int]], groups: int = 0) -> Snapshot:
    """Return what the processes have used so far, by name; one that is gone counts nothing."""
    cpu_s, resident = dict.fromkeys(pids, 0.0), dict.fromkeys(pids, 0)
    for name, some in pids.items():
        for pid in [some] if isinstance(some, int) else some:
            with suppress(FileNotFoundError, ProcessLookupError):
                fields = _fields(pid)
                cpu_s[name] += (int(fields[11]) + int(fields[12])) * _TICK_S
                resident[name] += int(fields[21]) * _PAGE
    times = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    busy = sum(times) - times[3] - times[4]  # idle and waiting for a disk
    return Snapshot(groups, time.perf_counter(), cpu_s, resident, busy * _TICK_S)


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, and itself."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                parents.setdefault(int(_fields(int(folder.name))[1]), []).append(int(folder.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def by_service(pids: Iterable[int]) -> dict[str, list[int]]:
    """Return the processes by the service that each runs, as its command line says; all others as `server`."""
    found: dict[str, list[int]] = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            named = re.search(r"lachesis run (\S+)|(nats-server) ", line)
            name = named[named.lastindex or 0] if named else "server"
            found.setdefault(name, []).append(pid)
    return found


class Processes:
    """Processes with their logs in one folder, run by the Python and the source tree that are measured."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self.folder, self.running = folder, dict[str, subprocess.Popen[bytes]]()
        paths = (tree / "src", BENCHMARKS)
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "XDG_STATE_HOME": str(folder / "state"),
        }

    def start(
        self, name: str, arguments: list[str], *, python: str = sys.executable, stdin: int | None = None,
        stdout: int | None = None,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        from lachesis.pipeline.common.child_process import die_with_parent  # which the Python of TransferQueue has not

        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [python, *arguments], cwd=self.folder, env=self.environment,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=log if stdout is None else stdout, stderr=log,
                preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509 - it takes no lock
            )  # fmt: skip
        return self.running[name]

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.running.items()}

    def finish(self, name: str, within_s: float) -> None:
        """Wait until process `name` ends. Raises `RuntimeError` with the end of its log if it, or another, fails."""
        until_s = time.monotonic() + within_s
        while self.running[name].poll() is None and time.monotonic() < until_s:
            with suppress(subprocess.TimeoutExpired):
                self.running[name].wait(timeout=1.0)
            for other, process in self.running.items():
                if process.poll():
                    raise RuntimeError(f"{other} ended with {process.returncode}: {self.log(other)}")
        if self.running[name].poll() != 0:
            raise RuntimeError(f"{name} did not finish in {within_s:g} s: {self.log(name)}")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-2000:]

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End every process with the context."""
        try:
            yield
        finally:
            for process in self.running.values():
                process.terminate()
            for process in self.running.values():
                try:
                    process.wait(timeout=_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
