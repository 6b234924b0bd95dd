"""A rank that stays away, or that stops answering, is named by a notice, which is withdrawn when it is back."""

from collections.abc import Mapping

import pytest

from lachesis.pipeline.trainer.ranks.absent import describe_absent


@pytest.mark.parametrize(
    ("heard_s", "stopped", "now_s", "what", "why", "mend"),
    [
        ({}, {}, 6.0, None, None, None),  # they import torch
        ({}, {}, 59.0, None, None, None),
        ({1: 58.0}, {}, 59.0, None, None, None),
        ({}, {}, 61.0, "ranks 1, 2 of the trainer have not come", "1 of 3 are there", "log"),
        ({1: 60.5}, {}, 61.0, "rank 2 of the trainer has not come", "2 of 3 are there", "log"),
        ({1: 99.5, 2: 99.0}, {}, 100.0, None, None, None),
        ({1: 99.5, 2: 94.0}, {}, 100.0, None, None, None),
        ({1: 99.5, 2: 90.0}, {}, 100.0, "rank 2 of the trainer has fallen silent", "no sign of life for 10 s", "log"),
        ({}, {2: 77}, 2.0, None, None, None),
        ({}, {2: 77}, 4.0, "rank 2 of the trainer is stopped", "stopped its process 77", "`kill -CONT 77`"),
        ({}, {1: 76, 2: 77}, 4.0, "ranks 1, 2 of the trainer are stopped", "76 77", "`kill -CONT 76 77`"),
        ({1: 99.5, 2: 96.0}, {2: 77}, 100.0, "rank 2 of the trainer is stopped", "its process 77", "`kill -CONT 77`"),
        ({1: 99.5, 2: 99.0}, {2: 77}, 100.0, None, None, None),
    ],
)
def test_which_rank_is_away_and_why(  # noqa: PLR0917 - by name
    heard_s: Mapping[int, float],
    stopped: Mapping[int, int],
    now_s: float,
    what: str | None,
    why: str | None,
    mend: str | None,
) -> None:
    found = describe_absent(heard_s, 3, 0.0, now_s, stopped)
    if what is None or why is None or mend is None:
        assert found is None
    else:
        assert found is not None
        assert found.what == what
        assert why in found.why
        assert mend in found.mend
