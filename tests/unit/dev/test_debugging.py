"""What keeps a breakpoint from running into time limits, and a call that never returns from hanging in silence."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.services.dev.debugging import PausedClock

pytestmark = [pytest.mark.timeout(120), pytest.mark.outside]


def test_the_clock_stands_while_somebody_stands_at_a_breakpoint() -> None:
    clock = PausedClock(100.0)
    clock.record(100.5, stands=False)
    assert clock.read(100.6) == pytest.approx(100.6)
    clock.record(100.7, stands=True)
    assert clock.read(100.8) == pytest.approx(100.7)
    clock.record(400.0, stands=True)
    assert clock.read(500.0) == pytest.approx(100.7)
    clock.record(500.0, stands=False)
    assert clock.read(500.25) == pytest.approx(100.95)


def test_time_in_which_nobody_could_look_does_not_count() -> None:
    clock = PausedClock(0.0)
    assert clock.read(60.0) == pytest.approx(1.0)  # an IDE suspended the watching thread as well
    clock.record(60.0, stands=False)
    assert clock.read(60.5) == pytest.approx(1.5)


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans(), st.booleans())))
def test_the_clock_never_goes_back_nor_faster(steps: list[tuple[float, bool, bool]]) -> None:
    clock, now_s, before = PausedClock(0.0), 0.0, 0.0
    for passed_s, looks, stands in steps:
        now_s += passed_s
        if looks:
            clock.record(now_s, stands=stands)
        read = clock.read(now_s)
        assert before - 1e-9 <= read <= before + passed_s + 1e-9
        before = read


PROGRAM = """
import sys, time
import anyio
import anyio.to_thread
from lachesis.pipeline.scorer.rater import FunctionRater
from lachesis.pipeline.common.user_code import log_failure
from lachesis.services.dev.debugging import run_for_breakpoints

def hangs(sample):
    print("hangs", flush=True)
    while True:
        time.sleep(0.01)

def breaks(sample):
    breakpoint()
    return 1.0

async def main():
{main}

sys.exit(run_for_breakpoints(main, max_call_s={max_call_s}))
"""


class Program:
    """A program that runs `main` for breakpoints, in a process of its own."""

    def __init__(self, folder: Path, main: str, *, max_call_s: float = 60.0) -> None:
        file = folder / "program.py"
        file.write_text(PROGRAM.format(main=textwrap.indent(textwrap.dedent(main), "    "), max_call_s=max_call_s))
        self.process = subprocess.Popen(
            [sys.executable, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self, said: str = "") -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(said, timeout=100)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode, out, err


@pytest.mark.slow
def test_a_call_that_never_returns_is_named_and_ended(tmp_path: Path) -> None:
    code, _, err = Program(tmp_path, "return FunctionRater(hangs).rate(None)", max_call_s=0.5).end()
    assert code == 1
    assert "this call has not returned" in err
    assert "in hangs\n    time.sleep(0.01)" in err
    assert "anyio" not in err


@pytest.mark.slow
def test_a_thread_that_never_returns_does_not_keep_the_process(tmp_path: Path) -> None:
    main = """
    began = anyio.Event()
    def call():
        anyio.from_thread.run_sync(began.set)
        return FunctionRater(hangs).rate(None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: anyio.to_thread.run_sync(call, abandon_on_cancel=True))
        await began.wait()
        tasks.cancel_scope.cancel()
    return {result}
    """
    for result, expected in (("False", 1), ("True", 0)):
        code, _, err = Program(tmp_path, main.format(result=result)).end()
        assert code == expected
        assert "the process ends without it" in err
        assert "in hangs" in err
    code, _, err = Program(tmp_path, main.format(result="1 / 0")).end()
    assert code == 1
    assert "ZeroDivisionError" in err


@pytest.mark.slow
def test_threads_of_the_users_own_are_left_to_the_interpreter(tmp_path: Path) -> None:
    main = """
    from concurrent.futures import ThreadPoolExecutor
    main.pool = ThreadPoolExecutor(1)
    return main.pool.submit(lambda: True).result()
    """
    assert Program(tmp_path, main).end() == (0, "", "")


@pytest.mark.slow
def test_an_interrupt_ends_code_that_does_not_return(tmp_path: Path) -> None:
    program = Program(tmp_path, "return FunctionRater(hangs).rate(None)")
    assert program.process.stdout is not None
    assert program.process.stdout.readline() == "hangs\n"
    program.process.send_signal(signal.SIGINT)
    code, _, err = program.end()
    assert (code, err) == (130, "lachesis: stopped\n")


@pytest.mark.slow
def test_no_time_limit_runs_out_at_a_breakpoint_on_the_loop_or_in_a_thread(tmp_path: Path) -> None:
    main = """
    for call in (FunctionRater(breaks).rate, lambda _: anyio.to_thread.run_sync(FunctionRater(breaks).rate, None)):
        with anyio.fail_after({limit}):
            answer = call(None)
            assert answer == 1.0 or await answer == 1.0
            await anyio.sleep(0.01)
    return True
    """
    asked = "p 'asked'\nimport time; time.sleep(4)\nc\n" * 2
    code, out, err = Program(tmp_path, main.format(limit=3)).end(asked)
    assert code == 0, err
    assert out.count("'asked'") == 2
    assert out.count("breaks()") >= 2


@pytest.mark.slow
def test_quitting_the_debugger_ends_the_process(tmp_path: Path) -> None:
    main = """
    try:
        return FunctionRater(breaks).rate(None)
    except Exception as error:  # as a stage does
        log_failure("rater breaks", error)
    return True
    """
    code, _, err = Program(tmp_path, main).end("q\n")
    assert (code, err) == (130, "lachesis: stopped\n")


@pytest.mark.slow
def test_a_failure_is_printed_from_the_users_code_on_and_once(tmp_path: Path) -> None:
    main = """
    def one(sample):
        return two()
    def two():
        raise KeyError("lost") from ValueError("why")
    for _ in range(3):
        try:
            FunctionRater(one).rate(None)
        except KeyError as error:
            log_failure("rater one", error)
    return True
    """
    code, _, err = Program(tmp_path, main).end()
    assert code == 0
    assert err.count("rater one:\n") == err.count("KeyError: 'lost'") == err.count("ValueError: why") == 1
    assert "in one" in err
    assert "in two" in err
