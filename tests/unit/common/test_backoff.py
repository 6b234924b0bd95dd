"""The retry policy: pauses and when to give up."""

import pytest

from lachesis.pipeline.common.backoff import RetryPolicy


def test_pauses_grow_up_to_the_longest() -> None:
    policy = RetryPolicy(first_s=0.1, longest_s=1.0, growth=3.0)
    assert [policy.pause_s(failures) for failures in range(1, 6)] == pytest.approx([0.1, 0.3, 0.9, 1.0, 1.0])


@pytest.mark.parametrize("longest_s", [5.0, float("inf")])
def test_any_number_of_failures_has_a_pause(longest_s: float) -> None:
    assert 0 < RetryPolicy(first_s=0.1, longest_s=longest_s).pause_s(100_000) <= longest_s


@pytest.mark.parametrize("jitter", [0.5, 1.0])
def test_jitter_takes_at_most_its_share_and_differs(jitter: float) -> None:
    policy = RetryPolicy(first_s=8.0, longest_s=4.0, jitter=jitter)
    pauses = [policy.pause_s(1) for _ in range(200)]
    assert 4.0 * (1 - jitter) <= min(pauses) < max(pauses) <= 4.0
    assert len(set(pauses)) > 100


def test_it_gives_up_by_attempts_or_by_time_or_never() -> None:
    assert not RetryPolicy(first_s=1.0).gives_up(10**9, 1e9)
    three = RetryPolicy(first_s=1.0, attempts=3)
    assert [three.gives_up(failures, 1e9) for failures in (2, 3)] == [False, True]
    minute = RetryPolicy(first_s=1.0, give_up_s=60.0)
    assert [minute.gives_up(10**9, elapsed_s) for elapsed_s in (59.9, 60.0)] == [False, True]
