"""Code that holds the interpreter is named by its line, by its own process and by another one while it lasts."""

import faulthandler
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lachesis.pipeline.common.code_place import StackLine, holding_place, place_of
from lachesis.pipeline.runtime import blocked_interpreter
from lachesis.pipeline.runtime.blocked_interpreter import HOLD_S, InterpreterHolds, held_place
from lachesis.pipeline.runtime.process_note import MAX_NOTE_BYTES, ProcessNote, read_note

_HELD = """
import ctypes, logging, sys, time
from lachesis.pipeline.runtime.blocked_interpreter import INTERPRETER_HOLDS

logging.basicConfig(stream=sys.stdout)
libc = ctypes.PyDLL(None)  # whose calls keep the interpreter

def reward():
    print("begins", flush=True)
    libc.read(0, ctypes.create_string_buffer(1), 1)

with INTERPRETER_HOLDS.watched():
    while INTERPRETER_HOLDS.describe() is None:  # what it waited for a processor does not count: it may take two
        began_s = time.monotonic()
        reward()
        assert INTERPRETER_HOLDS.was_held_since(began_s)
        while INTERPRETER_HOLDS._ended_s < began_s or INTERPRETER_HOLDS._note.size:
            time.sleep(0.02)
        armed_s = INTERPRETER_HOLDS._armed_s
        while INTERPRETER_HOLDS._armed_s == armed_s:  # its thread empties the note before it has recorded the hold
            time.sleep(0.02)
    print(INTERPRETER_HOLDS.describe(), flush=True)
"""
"""Holds its interpreter until a byte comes, again and again until it has said so."""
_STDLIB = sysconfig.get_path("stdlib")
_DUMP = """Timeout (0:00:01)!
Thread 0x00007f (most recent call first):
  File "/home/me/raters.py", line 7 in slow
  File "<frozen threading>", line 1002 in _bootstrap

Thread 0x00007e (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "/home/me/main.py", line 3 in <module>
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    code = tmp_path / "judge.py"
    code.write_text(textwrap.dedent(_HELD))
    with subprocess.Popen([sys.executable, code], stdin=-1, stdout=-1, bufsize=1, text=True) as process:
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.outside
def test_a_held_interpreter_is_named_from_outside_and_by_itself_afterwards(held: "subprocess.Popen[str]") -> None:
    assert held.stdin is not None
    assert held.stdout is not None
    expected, named = "reward (judge.py, line 10) of <module>", False
    while (said := held.stdout.readline()) == "begins\n":
        other, reads = "", 0
        while (place := held_place(held.pid)) != expected and reads < 200:
            assert held.poll() is None
            reads = reads + 1 if place is not None and place == other else 0  # it may be half written
            other = place or ""
            time.sleep(0.01)
        named |= (
            place == expected
        )  # a process that waited for a processor may have noted a line before this one: once more
        held.stdin.write("\n")
    assert named
    said += held.stdout.read()
    assert "reward (judge.py, line 10) of <module> held Python itself for" in said
    assert "in which nothing else of its process runs" in said
    assert held.wait(60) == 0
    assert held_place(held.pid) is None


@pytest.mark.parametrize(
    ("late_s", "delayed_s", "is_named"),
    [(0.0, 0.0, True), (0.3, 0.0, True), (2.0, 0.0, False), (20.0, 0.0, False), (0.0, 3.0, True), (0.0, 4.5, False)],
)
def test_no_code_is_named_for_a_time_in_which_the_process_did_not_run(
    late_s: float, delayed_s: float, is_named: bool
) -> None:
    holds, note, armed_s, armed_ns = InterpreterHolds(), ProcessNote("test"), time.monotonic() - 5.0, time.time_ns()
    note.write(_DUMP.encode())
    written_ns = armed_ns + round((HOLD_S + late_s) * 1e9)
    os.utime(note.fd, ns=(written_ns, written_ns))
    holds._record(note, armed_s, armed_ns, delayed_s)
    assert (holds.describe() is not None) == is_named
    assert note.size == 0
    note.close()


@pytest.mark.parametrize(
    ("late_s", "delayed_s", "was_held", "is_armed"),
    [(0.0, 0.0, False, True), (1.0, 0.0, False, False), (0.0, 1.0, False, False), (3.0, 0.0, True, True)],
)
def test_no_stack_is_read_where_the_machine_was_short_of_processors_or_memory(
    late_s: float, delayed_s: float, was_held: bool, is_armed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read the stacks of threads that run may crash the process, and where the machine is short they may run."""
    armed: list[bool] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: armed.append(True))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append(False))
    monkeypatch.setattr(blocked_interpreter, "_delayed_ns", lambda: round(delayed_s * 1e9))
    holds, note = InterpreterHolds(), ProcessNote("test")
    holds._look_for_shortage(time.monotonic() - 1.0 - late_s, 0, was_held=was_held)
    holds._arm(note)
    assert armed == [is_armed]
    holds._short_s -= 11.0
    holds._arm(note)
    assert armed[1:] == [True]
    note.close()


def test_the_thread_that_waits_for_nothing_is_named() -> None:
    assert holding_place(_DUMP) == "slow (raters.py, line 7)"
    assert holding_place(_DUMP.replace("/home/me/raters.py", "/usr/lib/python3.11/queue.py")) is None
    assert holding_place("") is None
    cut = _DUMP[: _DUMP.index(" in slow")]
    assert holding_place(cut) == holding_place(f"{cut} in ") is None


def test_threads_of_this_project_that_wait_in_their_first_function_are_not_blamed() -> None:
    """Where every thread waits, other processes had the processor: `_watch` polls, and has no line to mend."""
    waiting = f"""Thread 0x1 (most recent call first):
  File "/home/me/site-packages/lachesis/services/process/drain_limit.py", line 59 in _watch
  File "{_STDLIB}/threading.py", line 982 in run
Current thread 0x2 (most recent call first):
  File "{_STDLIB}/selectors.py", line 468 in select
  File "{_STDLIB}/asyncio/base_events.py", line 1871 in _run_once
"""
    assert holding_place(waiting) is None
    works = '  File "/home/me/site-packages/torch/serialization.py", line 9 in load\n'
    busy = waiting.replace("Thread 0x1 (most recent call first):\n", f"Thread 0x1 (most recent call first):\n{works}")
    assert holding_place(busy) == "load (serialization.py, line 9)"


def test_somebodys_own_line_comes_before_those_of_libraries() -> None:
    library = StackLine(re.__file__, 166, "match")
    installed = StackLine("/opt/lib/python3.11/site-packages/sympy/core.py", 3, "simplify")
    ours = StackLine("/opt/lib/python3.11/site-packages/lachesis/pipeline/rollout.py", 9, "collect")
    own = StackLine("/home/me/env.py", 4, "reward")
    assert place_of([library, own]) == "reward (env.py, line 4)"
    assert place_of([library, installed, own, ours]) == "reward (env.py, line 4)"
    assert place_of([library, installed, ours]) == "simplify (core.py, line 3)"
    assert place_of([library, ours]) == "collect (rollout.py, line 9)"
    assert place_of([library]) == "match (__init__.py, line 166)"


def test_a_note_that_is_too_long_is_none() -> None:
    note = ProcessNote("test")
    note.write(b"x" * 10)
    note.write(b"short")
    assert note.read() == b"short"
    note.write(b"x" * (MAX_NOTE_BYTES + 1))
    assert note.read() == b""
    assert read_note(-1, "test") == b""
    note.close()
