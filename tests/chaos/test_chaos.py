"""A short part of the campaign, for CI: a round for each kind of servers under a run."""

from pathlib import Path

import pytest
from chaos.rounds import Kind, Round, play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(("seed", "servers"), [(12, "standalone"), (11, "supervised"), (13, "cluster")])
async def test_nothing_is_lost_or_double_whatever_is_struck(tmp_path: Path, seed: int, servers: Kind) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    this = Round(seed=seed, kills=8, servers=servers)
    await play(this, folder)
    assert this.verdict.violations == {}
    assert this.tally.kills == 8
    assert this.verdict.steps > 3
