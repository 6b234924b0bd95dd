"""Exports over a bus in memory: what others wrote into the streams does not end them."""

import sys
import time

import pytest

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.offline.archive.exporter import Exporter, ExportRequest
from lachesis.pipeline.offline.archive.jsonl import read_lines, read_row
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, DeadLetter, GroupReward, RewardEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.replay import Selection

CONFIG = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="sums.py:Sums")})


def exporter(lab, place):
    request = ExportRequest(
        path=place, format=place.suffix[1:], revision="live", selection=Selection(envs=["sums"])
    )  # fmt: skip
    return Exporter(lab.bus, CONFIG, request, lambda *_: None)


async def test_a_dead_letter_of_no_group_is_passed_over(lab, tmp_path):
    seq = await lab.store(lab.group(1))
    letter = DeadLetter(
        run="r", env="sums", revision="live", stage="scorer", kind="data", stream=subjects.ROLLOUTS, seq=seq,
        group="no hexadecimal name", reason="none", place="scorer x", time_ns=time.time_ns(), leased=False,
    )  # fmt: skip
    await lab.bus.publish(subjects.event("dead", "r", "live", "sums"), encode(letter), msg_id="forged")
    done = await exporter(lab, tmp_path / "out.jsonl").run()
    assert (done.groups, done.left_out, done.unscored) == (1, 0, 1)


async def test_a_reward_of_another_number_of_samples_leaves_the_others_without_one(lab, tmp_path):
    """As where one id was given to two rollouts."""
    group = lab.group(1, samples=3)
    reward = GroupReward(
        group=group.id, seq=await lab.store(group), item="i", policy_step=0, verdict="trainable", scores=[0.0, 1.0],
        rewards=[-1.0, 1.0], advantages=[-1.0, 1.0], snapshot="s", mean=0.0, std=1.0, range=1.0, n_valid=2,
        turn_advantages=[[-1.0], [1.0]],
    )  # fmt: skip
    commit = Commit(term="t", index=0, cursors={}, delta=b"", crc32=0)
    event = RewardEvent(run="r", env="sums", revision="live", advantage="rloo", commit=commit, groups=[reward])
    await lab.bus.publish(subjects.event("reward", "r", "live", "sums"), encode(event), msg_id="reward")
    place = tmp_path / "out.jsonl"
    await exporter(lab, place).run()
    rows = [read_row(line.data) for line in read_lines(place)]
    assert [row.advantage for row in rows] == [-1.0, 1.0, None]
    assert [row.turn_advantages for row in rows] == [[-1.0], [1.0], None]


async def test_without_pyarrow_parquet_is_refused_before_history_is_read(lab, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what an import of it then finds is: nothing
    monkeypatch.setattr(lab.bus, "read", None)
    with pytest.raises(StartupError, match="Parquet needs pyarrow"):
        await exporter(lab, tmp_path / "out.parquet").run()
    assert list(tmp_path.iterdir()) == []
