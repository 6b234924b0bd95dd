"""A short part of the campaign, for CI: one round with a server that can be cut off, one with the supervisor's own."""

from pathlib import Path

import pytest
from chaos.rounds import Round, play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("standalone", [True, False])
async def test_nothing_is_lost_or_double_whatever_is_struck(tmp_path: Path, standalone: bool) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    this = Round(seed=11 + standalone, kills=8, standalone=standalone)
    await play(this, folder)
    assert this.verdict.violations == {}
    assert this.tally.kills == 8
    assert this.verdict.steps > 3
