from dataclasses import replace

import pytest

from lachesis.pipeline.config.run import RunConfig, ServicesConfig, TrainingConfig
from lachesis.services.process.service_process import (
    EXIT_API_KEY,
    EXIT_FENCED,
    EXIT_HISTORY_LOST,
    EXIT_NO_MEMORY,
    EXIT_NO_ROOM,
    EXIT_NOT_PERMITTED,
    EXIT_OWN_CODE,
    EXIT_REFUSED,
    EXIT_SETTINGS_CHANGED,
    EXIT_STARTUP,
)
from lachesis.services.supervisor.readiness import ready_within_s
from lachesis.services.supervisor.restarts import (
    MAX_FAILURES,
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    ProcessLife,
    Restarts,
    describe_crash,
)

KILLED = -9
UP = ProcessLife(-15, 60.0, ready=True)


def lives_until_the_end(life: ProcessLife, *, first: ProcessLife | None = UP, most: int = 100) -> int | None:
    """Return after how many lives like `life` the run ends, None if it goes on."""
    history = Restarts()
    if first is not None:
        assert history.ended(first) is not None
    return next((n for n in range(1, most) if history.ended(life) is None), None)


def test_a_process_that_crashes_by_itself_ends_the_run() -> None:
    assert lives_until_the_end(ProcessLife(1, 0.5, ready=False)) == MAX_FAILURES
    assert lives_until_the_end(ProcessLife(1, 0.5, ready=True)) == MAX_FAILURES


@pytest.mark.parametrize("code", [0, EXIT_STARTUP, EXIT_FENCED, EXIT_NO_ROOM, EXIT_OWN_CODE, 7])
def test_a_code_that_was_not_noted_says_nothing(code: int) -> None:
    life = ProcessLife(code, 0.5, ready=True, noted=False)
    assert lives_until_the_end(life) == MAX_FAILURES
    assert str(life).startswith(f"ended with code {code} (it gave no reason, so code that it runs has ended it")


def test_a_crash_is_named_with_its_place() -> None:
    log = ["INFO a", "Fatal Python error: Segmentation fault", "", "Thread 0x1 (most recent call first):",
           '  File "/usr/lib/python3.11/threading.py", line 3 in wait', "Current thread 0x2 (most recent call first):",
           '  File "/usr/lib/python3.11/ctypes/__init__.py", line 5 in f', '  File "/home/me/envs.py", line 9 in task',
           "", "Extension modules: numpy"]  # fmt: skip
    assert describe_crash(log) == 'Segmentation fault at File "/home/me/envs.py", line 9 in task'
    assert describe_crash(log[:1]) is None
    assert "crashed it by SIGSEGV" in str(ProcessLife(-11, 0.5, ready=True, noted=False))


def test_kills_from_outside_never_do_however_quickly_they_come() -> None:
    assert lives_until_the_end(ProcessLife(KILLED, 0.1, ready=True)) is None
    assert lives_until_the_end(ProcessLife(KILLED, 0.1, ready=True), first=None) is None


def test_a_kill_before_it_was_up_counts_for_it_may_never_come_up() -> None:
    assert lives_until_the_end(ProcessLife(KILLED, 0.1, ready=False)) == MAX_FAILURES


def test_kills_from_outside_neither_count_nor_forgive() -> None:
    history = Restarts()
    for _ in range(MAX_FAILURES - 1):
        assert history.ended(ProcessLife(1, 0.5, ready=True)) is not None
        assert history.ended(ProcessLife(KILLED, 0.5, ready=True)) is not None
    assert history.ended(ProcessLife(1, 0.5, ready=True)) is None


def test_running_out_of_memory_again_and_again_ends_the_run_even_if_each_life_takes_a_while() -> None:
    life = ProcessLife(KILLED, 60.0, ready=True, starved=True)
    assert lives_until_the_end(life) == MAX_FAILURES
    assert "out of memory" in str(life)
    assert lives_until_the_end(ProcessLife(KILLED, 3600.0, ready=True, starved=True)) is None


def test_what_ends_by_itself_while_memory_runs_out_elsewhere_is_judged_as_ever() -> None:
    assert lives_until_the_end(ProcessLife(1, 60.0, ready=True, starved=True)) is None
    assert "memory" not in str(ProcessLife(1, 60.0, ready=True, starved=True))


def test_a_process_that_was_up_for_a_while_has_a_clean_slate() -> None:
    assert lives_until_the_end(ProcessLife(1, MAX_PAUSE_S + 1, ready=True)) is None


def test_a_process_that_was_up_once_and_never_comes_up_again_ends_the_run_however_long_it_tries() -> None:
    assert lives_until_the_end(ProcessLife(1, MAX_PAUSE_S + 1, ready=False)) == MAX_FAILURES
    assert lives_until_the_end(ProcessLife(EXIT_STARTUP, 10.0, ready=False)) is None, "the server is unavailable"


def test_one_that_finds_history_lost_ends_the_run_however_long_each_life_looks_for_it() -> None:
    lost = ProcessLife(EXIT_HISTORY_LOST, MAX_PAUSE_S + 7, ready=False)
    assert lives_until_the_end(lost) == 3
    assert "do not fit each other" in str(lost)


def test_one_that_met_a_full_disk_waits_for_room_however_long_that_takes() -> None:
    full = ProcessLife(EXIT_NO_ROOM, 0.5, ready=False)
    history = Restarts()
    assert {history.ended(full) for _ in range(1000)} == {MAX_PAUSE_S}
    assert history.failures == 0
    assert "disk is full" in str(full)


@pytest.mark.parametrize(
    ("code", "said"), [(EXIT_REFUSED, "its credentials are refused"), (EXIT_API_KEY, "the key is refused")]
)
def test_one_whose_credentials_are_refused_waits_if_they_were_taken_before(code: int, said: str) -> None:
    refused = ProcessLife(code, 0.5, ready=False)
    assert lives_until_the_end(refused) is None
    assert lives_until_the_end(refused, first=None) == MAX_FAILURES
    assert said in str(refused)


@pytest.mark.parametrize(
    ("code", "said", "once_ready"),
    [
        (EXIT_REFUSED, "has credentials that the server refuses", False),
        (EXIT_API_KEY, "has a key that a server refuses", False),
        (EXIT_NOT_PERMITTED, "lacks a permission at the server", True),
        (EXIT_SETTINGS_CHANGED, "cannot go on", True),
        (EXIT_NO_MEMORY, "ran out of memory", True),
    ],
)
def test_an_end_that_comes_again_at_every_start_ends_the_run_at_once(code: int, said: str, once_ready: bool) -> None:
    refused, history = ProcessLife(code, 0.5, ready=False), Restarts()
    assert history.why_last(refused) == said
    assert history.why_last(replace(refused, noted=False)) is None, "code of an environment may have ended it so"
    assert (history.why_last(replace(refused, ready=True)) == said) == once_ready
    history.ended(UP)
    assert (history.why_last(refused) == said) == once_ready


@pytest.mark.parametrize("code", [0, 1, EXIT_STARTUP, EXIT_FENCED, EXIT_NO_ROOM, EXIT_OWN_CODE, KILLED])
def test_other_ends_are_tried_again(code: int) -> None:
    assert Restarts().why_last(ProcessLife(code, 0.5, ready=False)) is None


def test_one_whose_last_life_still_drains_waits_for_it() -> None:
    fenced = ProcessLife(EXIT_FENCED, 3.0, ready=False)
    assert lives_until_the_end(fenced, first=None) is None
    history = Restarts()
    assert {history.ended(fenced) for _ in range(20)} == {fenced.seconds}
    assert history.ended(ProcessLife(EXIT_FENCED, 0.1, ready=False)) == MIN_PAUSE_S
    assert history.ended(ProcessLife(EXIT_FENCED, 30.0, ready=False)) == MAX_PAUSE_S
    assert history.failures == 0
    assert "still drains" in str(fenced)
    assert lives_until_the_end(fenced) == MAX_FAILURES, "it was up, so this is another writer"


def test_a_start_may_take_as_long_as_what_it_waits_for_drains() -> None:
    config = RunConfig(
        run="r", mode="train", training=TrainingConfig(drain_s=900.0), services=ServicesConfig(ready_s=9)
    )
    assert ready_within_s(config, ["governor", "trainer"]) == 909.0
    assert ready_within_s(config, ["governor"]) == 9 + config.services.drain_s


def test_a_refusal_to_start_ends_the_run_at_its_second_time_unless_it_has_run_before() -> None:
    refused = ProcessLife(EXIT_STARTUP, 0.5, ready=False)
    assert lives_until_the_end(refused, first=None) == 2
    assert lives_until_the_end(refused) == MAX_FAILURES


def test_pauses_grow_while_it_fails_and_stay_short_while_it_is_only_killed() -> None:
    history = Restarts()
    pauses = [history.ended(ProcessLife(1, 0.5, ready=False)) for _ in range(MAX_FAILURES - 1)]
    assert pauses == [0.2, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    history = Restarts()
    assert {history.ended(ProcessLife(KILLED, 0.5, ready=True)) for _ in range(20)} == {MIN_PAUSE_S}


def test_code_that_fails_every_group_ends_the_run_however_long_each_life_takes() -> None:
    hopeless = ProcessLife(EXIT_OWN_CODE, 60.0, ready=True)
    assert lives_until_the_end(hopeless) == 3
    assert "the code that it runs failed" in str(hopeless)
    assert lives_until_the_end(ProcessLife(EXIT_OWN_CODE, 60.0, ready=True, worked=True)) is None


@pytest.mark.parametrize(
    ("code", "first", "limit"),
    [(EXIT_OWN_CODE, None, 3), (EXIT_HISTORY_LOST, UP, 3), (EXIT_HISTORY_LOST, None, 2), (EXIT_STARTUP, None, 2)],
)
def test_ends_of_one_kind_are_counted_apart_from_failures_of_other_kinds(
    code: int, first: ProcessLife | None, limit: int
) -> None:
    """Two crashes say nothing of whether the history is lost, or the environment's code fails."""
    end, crash = ProcessLife(code, 0.5, ready=False), ProcessLife(1, 0.5, ready=False)
    lives = [] if first is None else [first]
    lives += [crash] * 2 + [end] * (limit - 1) + [crash] + [end] * (limit - 1)
    history = Restarts()
    assert [history.ended(life) for life in lives].count(None) == 0
    assert history.ended(end) is None


def test_a_kill_from_outside_between_two_ends_of_one_kind_does_not_separate_them() -> None:
    history, end = Restarts(), ProcessLife(EXIT_OWN_CODE, 60.0, ready=True)
    for life in (end, ProcessLife(KILLED, 0.5, ready=True), end):
        assert history.ended(life) is not None
    assert history.ended(end) is None
