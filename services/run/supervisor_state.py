"""Publishes a supervisor's state: in a small file in the run's folder, and to systemd.

Guarantees that the file names the process, so that one that was killed is not taken for one that runs; that its
newest content is there as soon as the disk has room; and that the starter of the supervisor (systemd with
`Type=notify`, or `lachesis runs start`) is notified when the run is ready, without polling.
"""

import os
import socket
import time
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from lachesis.pipeline.common.disk import DeferredFile
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import from_json
from lachesis.services.run.process_identity import is_running, machine_id, started_ticks

__all__ = [
    "KEEPER_FILE",
    "STATE_FILE",
    "SUPERVISOR_LOG",
    "Phase",
    "Pid",
    "ProcessRecord",
    "SupervisorState",
    "SupervisorStateWriter",
    "read_record",
]

STATE_FILE = "supervisor.json"
KEEPER_FILE = "keeper.json"
"""Written by the process that starts a supervisor again, see `services/supervisor/supervisor_keeper.py`."""
SUPERVISOR_LOG = "supervisor.log"
"""In the run's folder: what a supervisor without a terminal prints."""
_NOTIFY_SOCKET = "NOTIFY_SOCKET"

Pid = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
T = TypeVar("T", bound=msgspec.Struct)
Phase = Literal["starting", "running", "stopping", "ended"]


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A process by what no other one has: see `process_identity`."""

    pid: Pid
    host: str
    machine: str
    started: int
    begun_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    """When it wrote this first, Unix ns."""

    @classmethod
    def current(cls) -> "ProcessRecord":
        """Return the record of this process."""
        pid = os.getpid()
        return ProcessRecord(
            pid=pid,
            host=socket.gethostname(),
            machine=machine_id(),
            started=started_ticks(pid) or 0,
            begun_ns=time.time_ns(),
        )

    @property
    def runs(self) -> bool | None:
        """Whether the process runs; None: it is of another machine."""
        return is_running(self.machine, self.pid, self.started)


class SupervisorState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a supervisor is. `ready` of its `processes` have been ready in this life of it."""

    process: ProcessRecord
    phase: Phase
    ready: int
    processes: int


class SupervisorStateWriter:
    """Writes the state of this process's supervisor into `folder`, and notifies its starter."""

    def __init__(self, folder: Path) -> None:
        self.file = DeferredFile(folder / STATE_FILE)
        self._process = ProcessRecord.current()
        self._socket = os.environ.pop(_NOTIFY_SOCKET, None)  # the services are not the ones to speak there
        self._reported: SupervisorState | None = None

    def report(self, phase: Phase, ready: int, processes: int, *, waits_for: str = "") -> None:
        """Write and say how far the supervisor is, unless that was said last.

        `waits_for`: the next process to become ready.
        """
        state = SupervisorState(process=self._process, phase=phase, ready=ready, processes=processes)
        if state == self._reported:
            return
        self._reported = state
        self.file.write(msgspec.json.encode(state))
        text = f"{phase}: {ready} of {processes} processes are ready" + (f", next {waits_for}" if waits_for else "")
        first = {"running": "READY=1\n", "stopping": "STOPPING=1\n"}.get(phase, "")
        self._notify(f"{first}STATUS={text if phase == 'starting' else phase}")

    def _notify(self, message: str) -> None:
        """Send a message as sd_notify(3) describes it. If the listener has gone, nothing is sent."""
        if self._socket is None:
            return
        address = f"\0{self._socket[1:]}" if self._socket.startswith("@") else self._socket
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(message.encode(), address)
            except OSError:
                self._socket = None


def read_record(file: Path, kind: type[T]) -> T | None:
    """Return what lies in one of the small files, None if there is none or none that can be read."""
    try:
        return from_json(file.name, kind, read_small_file(file))
    except (OSError, SchemaError):
        return None
