"""A process that ends again and again is said to do so until it has lived for longer than it did lately."""

import pytest

from lachesis.pipeline.notices.silence import ends_recur


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
