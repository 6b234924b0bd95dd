"""Notices that the supervisor makes of its own machine."""

import os

from lachesis.pipeline.common.machine_memory import resident_bytes
from lachesis.pipeline.notices.facts import ProcessFact
from lachesis.services.supervisor.notices import _memory_notices


def process(name: str, pid: int | None) -> ProcessFact:
    return ProcessFact(name=name, services=(name,), pid=pid, started_s=0.0)


def test_a_machine_with_next_to_no_memory_left_is_named_with_the_largest_process_of_the_run() -> None:
    processes = [process("health", None), process("scorer", 1 << 22), process("trainer", os.getpid())]
    assert list(_memory_notices(processes, 600 << 20, 5)) == list(_memory_notices(processes, None, 5)) == []
    (found,) = _memory_notices(processes, 100 << 20, 5)
    assert (found.what, found.stops) == ("the machine has 100.0 MiB of memory left", False)
    assert found.why.startswith("trainer has ")
    assert resident_bytes(os.getpid()) > 1 << 20
    (found,) = _memory_notices([], 100 << 20, 5)
    assert found.why == ""
