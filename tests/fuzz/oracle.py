"""What may become of one input: accepted, or refused with a documented error. Anything else is a finding.

A finding is a crash (another exception), a hang (more processor time than the limit), memory beyond a multiple of the
input, or a violation (`AssertionError` of the target: something was accepted that does not hold together).
"""

import random
import signal
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lachesis.schemas.errors import DataError

__all__ = ["Finding", "Target", "judge", "limited", "minimise"]

HANG_S = 5.0
"""Processor time, which other processes do not add to; who waits for ever is ended by the time limit of the test."""
MEMORY_TIMES = 512
"""Bytes of memory that one byte of input may cost: an empty dictionary takes one byte of msgpack and 72 of memory."""
MEMORY_FREE = 8 << 20
"""Bytes that any input may cost: caches, error texts, figures of the target itself."""
_TRIES = 400

Mutate = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """One edge. `feed` takes the bytes in, uses what they gave, and names the outcome; `refusals` may be raised."""

    name: str
    seeds: Sequence[bytes]
    mutate: Mutate
    feed: Callable[[bytes], str | None]
    refusals: tuple[type[Exception], ...] = (DataError,)
    weight: float = 1.0
    """Share of the cases, relative."""

    def case(self, rng: random.Random) -> bytes:
        """Return the next input."""
        return self.mutate(rng, rng.choice(self.seeds))


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not happen; `signature` is the same for the same fault."""

    kind: str
    signature: str
    text: str


class _HangError(BaseException):
    pass


def judge(target: Target, data: bytes) -> tuple[str, Finding | None, int]:
    """Return the outcome's name, the finding if it is one, and the peak of memory, bytes.

    Memory counts if it is taken twice: the first time may have loaded a module.
    """
    judged = _judge(target, data)
    return _judge(target, data) if judged[0] == "memory" else judged


def _judge(target: Target, data: bytes) -> tuple[str, Finding | None, int]:
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    started = time.process_time()
    try:
        with limited(HANG_S):
            outcome = target.feed(data) or "accepted"
    except target.refusals as error:
        outcome = type(error).__name__
    except _HangError as error:
        return "hang", _finding("hang", error), 0
    except AssertionError as error:
        return "violation", _finding("violation", error), 0
    except Exception as error:  # noqa: BLE001 - the oracle: whatever else is raised is what it looks for
        return "crash", _finding("crash", error), 0
    if time.process_time() - started > HANG_S:  # in C code, where no signal arrives
        return "hang", Finding("hang", f"hang {outcome}", f"{outcome} after {time.process_time() - started:.1f} s"), 0
    peak = tracemalloc.get_traced_memory()[1] - held
    if peak > MEMORY_TIMES * len(data) + MEMORY_FREE:
        return "memory", Finding("memory", f"memory {outcome}", f"{peak} bytes for an input of {len(data)}"), peak
    return outcome, None, peak


def minimise(target: Target, data: bytes, finding: Finding) -> bytes:
    """Return a shorter input with the same finding: parts are left out, large ones first. A hang is kept as it is."""
    if finding.kind == "hang":
        return data
    size, tries = max(1, len(data) // 2), 0
    while size and tries < _TRIES:
        at = 0
        while at < len(data) and tries < _TRIES:
            shorter = data[:at] + data[at + size :]
            tries += 1
            found = judge(target, shorter)[1]
            if found is not None and found.signature == finding.signature:
                data = shorter
            else:
                at += size
        size //= 2
    return data


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Interrupt what takes more processor time. Use it in the main thread."""

    def ring(*_: object) -> None:
        raise _HangError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _finding(kind: str, error: BaseException) -> Finding:
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-2:]]
    text = "".join(traceback.format_exception(error, limit=-8))
    return Finding(kind, f"{kind} {type(error).__name__} {' '.join(places)}", text)
