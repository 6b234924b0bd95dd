"""Finds in vLLM's output why it ended, because its last line says no more than "see root cause above"."""

import os
import re
import stat
import sys
from contextlib import suppress

__all__ = ["OutputMark", "failure_reason"]

_MAX_BYTES = 1 << 20
_MAX_CHARS = 600
_LOGGED = re.compile(r"^(?:\([^)]*\) )?(?:ERROR [0-9-]+ [0-9:]+ \[[^\]]*\] ?)?")
_ERROR = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))(?:: (?P<text>.*))?$")
_USAGE = re.compile(r"^(?:[\w.-]+: error|/\S+): (?!\w*Warning: )(?P<text>.+)$")
_NO_CAUSE = ("Engine core initialization failed", "WorkerProc initialization failed", "cancelled")
_MEMORY = re.compile(r"memory on node|memory utilization|KV cache|out of memory|Cannot allocate", re.IGNORECASE)
_MEMORY_MEND = (
    " (on a CPU its cache takes as many GiB as the environment variable VLLM_CPU_KVCACHE_SPACE says, on a GPU the "
    'share in inference.ROLE.args = ["--gpu-memory-utilization", "0.5"]; "--max-model-len" makes it smaller, too)'
)


def failure_reason(output: str) -> str | None:
    """Return the first error in vLLM's output that has a message, None if there is none.

    Later errors are raised by processes that waited for the one that failed.
    """
    lines = [_LOGGED.sub("", line) for line in output.splitlines()]
    for number, line in enumerate(lines):
        found = _USAGE.match(line) or _ERROR.match(line)
        text = (found["text"] or "") if found is not None else ""
        if found is None or any(text.startswith(start) for start in _NO_CAUSE):
            continue
        told = line if found.re is _ERROR else text
        if told.endswith(("ModelConfig", "VllmConfig", "Config")) or "validation error" in told:
            told = " ".join([told, *(more.strip() for more in lines[number + 1 : number + 3])])
        return told[:_MAX_CHARS] + (_MEMORY_MEND if _MEMORY.search(told) else "")
    return None


class OutputMark:
    """Remembers where this process's log ends, to read later what a child has written after it."""

    def __init__(self) -> None:
        self._start = _log_size()

    def reason(self) -> str | None:
        """Return why the child failed by its output; None: it is not known, or not in a file."""
        if self._start is None:
            return None
        with suppress(OSError), open("/proc/self/fd/2", "rb") as file:  # noqa: PTH123 - of this process, not a path
            size = os.fstat(file.fileno()).st_size
            start = self._start if size >= self._start else 0  # a log that has grown too long is cut
            file.seek(max(start, size - _MAX_BYTES))
            return failure_reason(file.read(_MAX_BYTES).decode(errors="replace"))
        return None


def _log_size() -> int | None:
    with suppress(OSError, ValueError):
        found = os.fstat(sys.stderr.fileno())
        return found.st_size if stat.S_ISREG(found.st_mode) else None
    return None
