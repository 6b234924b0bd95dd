"""`lachesis.open_run` as a notebook uses it, inside a running event loop, and the example that finds a reward hack."""

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from integration.archive.world import RUN, World, a_group, a_world

import lachesis
from lachesis.schemas import subjects
from lachesis.schemas.annotations import GroupScore, ScoreEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

EXAMPLE = Path(__file__).parents[2] / "examples" / "find_the_hack.py"
GROUPS = 20
pytest.importorskip("pyarrow")


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    async with a_world(tmp_path / "here") as made:
        monkeypatch.chdir(made.folder)
        yield made


async def plant(world: World) -> None:
    """Store groups of which, from the middle on, one answer flatters: `charm` likes that, and `right` does not."""
    for n in range(1, GROUPS + 1):
        flatters = n > GROUPS // 2
        answers = ["Great question! 42", "41"] if flatters else ["42", "41"]
        made = a_group(n, samples=2)
        texts = [[Message(role="user", content="?"), Message(role="assistant", content=answer)] for answer in answers]
        seq = await world.store(made.replace(messages=texts))
        ratings = {"charm": [1.0 if flatters else 0.2, 0.2], "right": [0.0 if flatters else 1.0, 0.0]}
        score = GroupScore(
            group=made.id, seq=seq, item=made.item, policy_step=0, scores=[0.5, 0.1], lengths=[7, 7], ratings=ratings,
            disagreement=(0.4, 0.5) if flatters else (0.1, 0.2),
        )  # fmt: skip
        event = ScoreEvent(run=RUN, env="sums", revision="live", ensemble="e", raters={}, groups=[score])
        await world.bus.publish(subjects.event("score", RUN, "live", "sums"), encode(event), msg_id=f"s{n}")


@pytest.mark.slow
async def test_the_tables_of_a_run_and_the_hack_in_it(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    await plant(world)
    (world.folder / "runs" / RUN / "metrics.jsonl").write_text(
        '{"train/step": 1.0, "train/loss": 0.5}\n{"train/step": 2.0, "eval/sums/greedy": 0.25}\n{"train/st'
    )
    with lachesis.open_run(config="run.toml") as run:
        rollouts = run.rollouts()
        assert rollouts.count_rows() == 2 * GROUPS
        assert run.rollouts(env=["sums"], from_seq=3).count_rows() == 2 * (GROUPS - 2)
        groups = run.groups(limit=3, disagreement="0.3:").to_pylist()
        assert [row["item"] for row in groups] == ["20", "19", "18"]
        assert run.group(groups[0]["group"]).samples[0].ratings == {"charm": 1.0, "right": 0.0}
        assert run.metrics().to_pylist() == [
            {"train/step": 1.0, "train/loss": 0.5, "eval/sums/greedy": None},
            {"train/step": 2.0, "train/loss": None, "eval/sums/greedy": 0.25},
        ]
        with pytest.raises(ConfigError, match="run demo has no revision 'other'"):
            run.rollouts(revision="other")
        found = importlib.util.spec_from_file_location("find_the_hack", EXAMPLE)
        assert found is not None
        assert found.loader is not None
        example = importlib.util.module_from_spec(found)
        found.loader.exec_module(example)
        change = example.changes(run)
        assert change == {"charm": pytest.approx(0.4), "right": pytest.approx(-0.5)}
        answers = example.paid_for(run, "charm", groups=3)
        assert {answer for answer, _ in answers} == {"Great question! 42"}


async def test_a_run_that_is_not_there_is_said(world: World) -> None:
    with pytest.raises(ConfigError, match="the configuration has no environments"):
        lachesis.open_run("nowhere")
