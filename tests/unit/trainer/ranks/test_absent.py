"""A rank that stays away, or that stops answering, is named by a notice, which is withdrawn when it is back."""

from collections.abc import Mapping

import pytest

from lachesis.pipeline.trainer.ranks.absent import describe_absent


@pytest.mark.parametrize(
    ("heard_s", "now_s", "what", "why"),
    [
        ({}, 4.0, None, None),
        ({}, 6.0, "ranks 1, 2 of the trainer have not come", "1 of 3 are there"),
        ({1: 5.5}, 6.0, "rank 2 of the trainer has not come", "2 of 3 are there"),
        ({1: 99.5, 2: 99.0}, 100.0, None, None),
        ({1: 99.5, 2: 90.0}, 100.0, "rank 2 of the trainer has fallen silent", "no sign of life for 10 s"),
    ],
)
def test_which_rank_is_away_and_why(
    heard_s: Mapping[int, float], now_s: float, what: str | None, why: str | None
) -> None:
    found = describe_absent(heard_s, 3, 0.0, now_s)
    if what is None or why is None:
        assert found is None
    else:
        assert found is not None
        assert found[0] == what
        assert why in found[1]
