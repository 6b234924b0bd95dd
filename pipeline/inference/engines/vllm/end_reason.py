"""Finds in vLLM's output why it ended, because its last line says no more than "see root cause above".

A process that the kernel kills for lack of memory says nothing; then the kernel's count of such kills rose just before
vLLM ended.
"""

import os
import re
import stat
import sys
import time
from contextlib import suppress

from lachesis.pipeline.common.machine_memory import MemoryKills

__all__ = ["OutputMark", "failure_reason"]

_MAX_BYTES = 1 << 20
_MAX_CHARS = 600
_ENDING_S = 15.0
"""Seconds that vLLM may take to end once the kernel has killed one of its processes: each waits for those below it."""
_LOGGED = re.compile(r"^(?:\([^)]*\) )?(?:ERROR [0-9-]+ [0-9:]+ \[[^\]]*\] ?)?")
_ERROR = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))(?:: (?P<text>.*))?$")
_USAGE = re.compile(r"^(?:[\w.-]+: error|/\S+): (?!\w*Warning: )(?P<text>.+)$")
_NO_CAUSE = ("Engine core initialization failed", "WorkerProc initialization failed", "cancelled")
_MEMORY = re.compile(r"memory on node|memory utilization|KV cache|out of memory|Cannot allocate", re.IGNORECASE)
_MEMORY_MEND = (
    " (on a CPU its cache takes as many GiB as the environment variable VLLM_CPU_KVCACHE_SPACE says, on a GPU the "
    'share in inference.ROLE.args = ["--gpu-memory-utilization", "0.5"]; "--max-model-len" makes it smaller, too)'
)
_DIED = re.compile(r"(?P<process>Worker proc \S+|EngineCore\S*) died unexpectedly")


def failure_reason(output: str, *, starved: bool = False) -> str | None:
    """Return the first error in vLLM's output that has a message, None if there is none.

    Later errors are raised by processes that waited for the one that failed. `starved`: the kernel has killed a process
    for lack of memory as vLLM ended, which leaves no message.
    """
    lines = [_LOGGED.sub("", line) for line in output.splitlines()]
    died = next((found["process"] for line in lines if (found := _DIED.search(line))), None)
    for number, line in enumerate(lines):
        found = _USAGE.match(line) or _ERROR.match(line)
        text = (found["text"] or "") if found is not None else ""
        if found is None or any(text.startswith(start) for start in _NO_CAUSE):
            continue
        reason = line if found.re is _ERROR else text
        if reason.endswith(("ModelConfig", "VllmConfig", "Config")) or "validation error" in reason:
            reason = " ".join([reason, *(more.strip() for more in lines[number + 1 : number + 3])])
        return reason[:_MAX_CHARS] + (_MEMORY_MEND if _MEMORY.search(reason) else "")
    if starved:
        return f"the kernel was out of memory and killed {died or 'a process'}{_MEMORY_MEND}"
    return None if died is None else f"{died} died without a message, as where something else kills it"


class OutputMark:
    """Remembers where this process's log ends, to read later what a child has written after it."""

    def __init__(self, kills: MemoryKills | None = None) -> None:
        self._start = _log_size()
        self._kills = kills or MemoryKills(within_s=_ENDING_S)

    def poll(self) -> None:
        """Look at what the kernel has killed, about once a second while the child runs."""
        self._kills.poll(time.monotonic())

    def reason(self) -> str | None:
        """Return why the child has just failed, by its output and the kernel's count; None: neither says it."""
        starved = self._kills.were_just_now(time.monotonic())
        if self._start is None:
            return failure_reason("", starved=starved)
        with suppress(OSError), open("/proc/self/fd/2", "rb") as file:  # noqa: PTH123 - of this process, not a path
            size = os.fstat(file.fileno()).st_size
            start = self._start if size >= self._start else 0  # a log that has grown too long is cut
            file.seek(max(start, size - _MAX_BYTES))
            return failure_reason(file.read(_MAX_BYTES).decode(errors="replace"), starved=starved)
        return failure_reason("", starved=starved)


def _log_size() -> int | None:
    with suppress(OSError, ValueError):
        found = os.fstat(sys.stderr.fileno())
        return found.st_size if stat.S_ISREG(found.st_mode) else None
    return None
