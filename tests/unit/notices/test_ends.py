"""A process that ends again and again is said to do so until it has lived for longer than it did lately."""

from itertools import accumulate, cycle, islice, pairwise

import pytest

from lachesis.pipeline.notices.facts import Moment, ProcessFact
from lachesis.pipeline.notices.silence import end_notices, ends_recur


@pytest.mark.parametrize(
    ("ends_s", "now_s", "recurs"),
    [
        ((), 0.0, False),
        ((1.0, 2.0), 2.0, False),
        ((10.0, 14.0, 18.0), 20.0, True),
        ((10.0, 14.0, 18.0), 27.0, False),  # it lived for 4 s each, and has for 9 by now
        ((10.0, 10.1, 10.2), 13.0, True),
        ((10.0, 10.1, 10.2), 14.0, False),
        ((0.0, 60.0, 120.0), 230.0, True),
        ((0.0, 60.0, 120.0), 241.0, False),
        ((0.0, 90.0, 94.0), 103.0, False),  # the first end was another cause's
    ],
)
def test_ends_recur(ends_s: tuple[float, ...], now_s: float, recurs: bool) -> None:
    assert ends_recur(ends_s, now_s) is recurs


@pytest.mark.parametrize("lives_s", [(5.0,), (60.0,), (400.0,), (5.0, 60.0), (5.0, 5.0, 60.0), (3.0, 150.0, 8.0, 90.0)])
def test_a_process_that_ends_again_and_again_is_named_without_a_break(lives_s: tuple[float, ...]) -> None:
    ends_s = list(accumulate(islice(cycle(lives_s), 40)))
    for count, (_, next_s) in enumerate(pairwise(ends_s), 1):
        if count > 2 * len(lives_s) + 2:
            assert ends_recur(ends_s[:count], next_s - 0.1)
    longest_s = max(lives_s)
    assert not ends_recur(ends_s, ends_s[-1] + max(3.0, 2 * longest_s) + 1)


@pytest.mark.parametrize(
    ("state", "age_s", "why"),
    [
        ("S", 10.0, None),
        ("R", 59.0, None),  # it imports torch on a busy machine
        ("R", 61.0, ""),
        ("T", 2.0, None),
        ("T", 4.0, "a signal or a debugger stopped its process 7"),
        ("t", 4.0, "a signal or a debugger stopped its process 7"),
        ("D", 61.0, "its process 7 waits for a disk or a device"),
    ],
)
def test_a_process_that_starts_is_named_once_it_is_stopped_or_very_late(
    state: str, age_s: float, why: str | None
) -> None:
    fact = ProcessFact(name="trainer", services=("trainer",), pid=7, started_s=100.0, state=state)
    found = list(end_notices([fact], {}, Moment(100.0 + age_s, 10**18)))
    assert [one.why for one in found] == ([] if why is None else [why])


@pytest.mark.parametrize(("service", "is_planned"), [("trainer", True), ("scorer", False)])
def test_a_process_that_ends_for_lack_of_memory_is_named_with_what_helps(service: str, *, is_planned: bool) -> None:
    end = "ended with code -9 (killed by the kernel, which was out of memory)"
    fact = ProcessFact(name=service, services=(service,), pid=None, started_s=0.0, failing=end, ends=1)
    (found,) = end_notices([fact], {}, Moment(100.0, 10**18))
    assert "more memory" in found.mend
    assert ("lachesis plan" in found.mend) == is_planned
