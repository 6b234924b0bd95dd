"""Why a process ended, by the end of its log."""

import pytest

from lachesis.services.supervisor.last_words import last_words

INFO = "2026-11-27 14:22:05,713 INFO environment-sums started, pid 28337, replica 1"
WARNING = "2026-11-27 14:22:05,800 WARNING environment-sums a group of item 3 failed: its code ends the process"
ERROR = "2026-11-27 14:22:05,900 ERROR environment-sums none of its 5 tasks leaves room"
UNEXPECTED = "2026-11-27 14:22:05,900 ERROR environment-sums ended by an unexpected error"
REAPER = "2026-11-27 14:22:06,000 INFO reaper ended 3 processes that it left: sleep"
TRACEBACK = ["Traceback (most recent call last):", '  File "env.py", line 3, in task', "SystemExit: 8"]
GROUP = [
    "  + Exception Group Traceback (most recent call last):",
    '  |   File "env.py", line 3, in task',
    "  | ExceptionGroup: unhandled errors (1 sub-exception)",
    "  +-+---------------- 1 ----------------",
    "    | KeyError: 'question'",
    "    +------------------------------------",
]


@pytest.mark.parametrize(
    ("lines", "noted", "said"),
    [
        ([], True, ""),
        ([INFO], True, ""),
        ([INFO, ERROR], True, "none of its 5 tasks leaves room"),
        ([INFO, ERROR, REAPER], True, "none of its 5 tasks leaves room"),
        ([INFO, WARNING, *TRACEBACK], False, ""),  # it went on after that error, and was ended later
        ([INFO, WARNING, *TRACEBACK, REAPER], False, ""),
        ([INFO, WARNING, *TRACEBACK, "malloc(): invalid size"], False, ""),
        ([INFO, *TRACEBACK], False, "SystemExit: 8"),
        ([INFO, WARNING], False, ""),
        ([INFO, WARNING], True, "a group of item 3 failed: its code ends the process"),
        ([INFO, WARNING, "malloc(): invalid size"], False, "malloc(): invalid size"),
        ([INFO, UNEXPECTED, *TRACEBACK], True, "SystemExit: 8"),
        ([INFO, UNEXPECTED, *GROUP], True, "KeyError: 'question'"),
        ([INFO, UNEXPECTED, *GROUP, "", REAPER], True, "KeyError: 'question'"),
        ([INFO, "terminate called after throwing an instance of 'std::bad_alloc'"], False,
         "terminate called after throwing an instance of 'std::bad_alloc'"),
    ],
)  # fmt: skip
def test_the_reason_of_an_end_is_what_was_logged_of_it(lines: list[str], noted: bool, said: str) -> None:
    assert last_words(lines, drained=False, noted=noted) == said


def test_a_process_that_drained_says_why() -> None:
    line = "2026-11-27 14:22:05,713 INFO batcher drained"
    assert last_words([INFO, line], drained=True, noted=True) == "drained"
    assert last_words([INFO, line], drained=False, noted=True) == ""


def test_the_end_of_a_long_reason_is_kept_as_its_beginning_is() -> None:
    error = f"21 groups in a row failed; it wrote at last: {'^' * 3000} KeyError: 'settings'"
    said = last_words([f"{ERROR} {error}"], drained=False, noted=True)
    assert said.startswith("none of its 5 tasks leaves room 21 groups in a row failed")
    assert said.endswith("KeyError: 'settings'")
    assert len(said) == 500
