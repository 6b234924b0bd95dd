"""Which environments are taken for gone: by what is usual for each."""

import pytest

from lachesis.pipeline.extensions.atropos.gateway.logic.silence import HeardClients


def silent_after(heard, now_s):
    """Return after how many seconds of silence it is said, to a tenth."""
    return next(n / 10 for n in range(40_000) if heard.is_silent("a", now_s + n / 10))


@pytest.mark.parametrize(
    ("pauses", "expected_s"),
    [
        ([], 120.0),
        ([0.1] * 10, 120.0),
        ([0.1] * 100, 20.0),
        ([300.0] * 20, 900.0),
        ([0.1] * 50 + [60.0] + [0.1] * 5, 175.5),
        ([60.0] + [0.1] * 2000, 20.0),
        ([3600.0] * 20, 1800.0),
    ],
    ids=["once", "little known", "polls", "seldom", "a long pause just now", "a long pause once", "very seldom"],
)
def test_silence_is_measured_by_the_pauses_of_the_environment(pauses, expected_s):
    heard, now_s = HeardClients(0.0), 1.0
    heard.hear("a", now_s)
    for pause_s in pauses:
        now_s += pause_s
        heard.hear("a", now_s)
    assert silent_after(heard, now_s) == pytest.approx(expected_s, abs=0.2)


def test_one_that_was_never_heard_is_silent_soon_after_the_start():
    heard = HeardClients(10.0)
    assert not heard.was_heard("a")
    assert not heard.is_silent("a", 15.0)
    assert heard.is_silent("a", 15.1)
