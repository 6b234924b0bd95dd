"""`lachesis eval` on real models: the held-out tasks of a run, by the estimators of its own evaluator."""

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner
from unit.cli.test_env_test_command import folder, server

from lachesis.pipeline.config.evaluation_sources import held_out_tasks
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.evaluator.logic.rates import TaskResult, standard_error
from lachesis.pipeline.ledger.checkpoint_state import TrainerState
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.commands import app
from lachesis.services.run.checkpoints import find_checkpoint

__all__ = ["folder", "server"]  # the fixtures

pytestmark = pytest.mark.outside

ENVIRONMENT = """
from lachesis import Environment, Task


class Parity(Environment):
    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self):
        return self.size

    def task(self, index):
        return Task(item=str(index), prompt=f"say {index}")

    def reward(self, task, session):
        return float(len(session.text) % 2)


class Silent(Environment):
    __len__, task = lambda self: 40, Parity.task


class Cautious(Parity):
    def reward(self, task, session):
        return None
"""
CONFIG = """
seed = 3
[environments.parity]
kind = "parity.py:Parity"
max_new_tokens = 8
[environments.small]
kind = "parity.py:Parity"
params = { size = 9 }
[evaluate]
held_out = 0.25
samples = 4
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parity.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(CONFIG)


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["eval", *arguments, "--config", "run.toml"])
    if isinstance(result.exception, Exception) and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def evaluated(*arguments: str) -> tuple[int, list[dict[str, object]]]:
    code, out, _ = call(*arguments, "--json")
    return code, json.loads(out)["evaluations"]


@pytest.mark.slow
def test_models_side_by_side_on_the_tasks_that_training_never_draws(folder: Path, server: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_policy(build_tiny_policy(1, width=16, layers=1), other)
    code, rows = evaluated(str(folder), str(folder), str(other), "--server", f"{server}/v1", "--out", "e/all.json")
    assert code == 0
    first, again, changed, served = rows
    assert json.loads(Path("e/all.json").read_text())["evaluations"] == rows

    config = load(run_config_type(), file=Path("run.toml"), environ={}, sets=[]).config
    held_out = sorted(held_out_tasks(config, "parity", load_environment("parity.py:Parity").item_keys()).tasks.tolist())
    for row in rows:
        assert row["environment"] == "parity", "the pool of the other one is too small to hold any out"
        assert sorted(map(int, row["results"])) == held_out
        results = [TaskResult(*pair) for pair in row["results"].values()]
        assert [result.judged for result in results] == [4] * 10
        rate = sum(result.succeeded for result in results) / 40
        assert (row["avg"], row["error"]) == (pytest.approx(rate), pytest.approx(standard_error(results)))
        assert row["pass_at"]["1"] == pytest.approx(rate)
        assert row["pass_at"]["1"] <= row["pass_at"]["2"] <= row["pass_at"]["4"]
        assert (row["answers"], row["unjudged"], row["failed"]) == (50, 0, 0)
        assert 50 <= row["tokens"] <= 50 * 8
    assert 0 < first["avg"] < 1, "so that rates may differ"
    assert first["difference"] is None
    assert again["results"] == first["results"], "the same model, tasks and seed"
    assert again["difference"][2:4] == [0.0, 0.0]
    assert changed["results"] != first["results"]
    before, after, value, _, tasks = changed["difference"]
    assert (before, after, tasks) == (pytest.approx(first["avg"]), pytest.approx(changed["avg"]), 10)
    assert value == pytest.approx(after - before)
    assert served["model"].startswith("tiny @ 127.0.0.1:")


def test_the_table_and_what_is_left_out(folder: Path) -> None:
    code, out, err = call(str(folder), str(folder), "--items", "3", "--samples", "2")
    assert code == 0
    header, *rows = out.splitlines()
    assert header.split()[2:6] == ["tasks", "avg@2", "pass@2", "greedy"]
    assert [row.split()[1:3] for row in rows] == [["parity", "3"]] * 2
    assert rows[1].rstrip().endswith("+0.000 +- 0.000")
    assert "environment small is not evaluated: of its 9 tasks fewer than 8" in err


@pytest.mark.slow
def test_a_model_that_gives_no_answer_ends_with_1_and_the_others_count(server: str) -> None:
    code, rows = evaluated("--server", f"{server}/v1", "--model", "tiny", "--model", "nobody", "--items", "8")
    assert code == 1
    told, silent = rows
    assert (told["answers"], told["failed"]) == (40, 0)
    assert (silent["answers"], silent["avg"], silent["greedy"], silent["tokens"]) == (0, None, None, 0)
    assert (silent["unjudged"], silent["failed"]) == (40, 16)
    assert any("not served here" in text for text in silent["errors"])


def test_answers_that_nobody_can_judge_are_counted_and_are_no_failures(folder: Path) -> None:
    (row,) = evaluated(str(folder), "--set", "environments.parity.kind=parity.py:Cautious", "--items", "2")[1]
    assert (row["answers"], row["unjudged"], row["avg"], row["pass_at"]) == (10, 10, None, dict.fromkeys("124"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no model to evaluate"),
        (["--set", "environments.parity.kind=parity.py:Silent", "x"], "it gives no reward, and no rater judges"),
        (["best"], "no best checkpoint"),
        (["newest"], "has no checkpoint yet"),
        (["7"], "no checkpoint of step 7"),
        (["nowhere/at/all"], "there is no folder 'nowhere/at/all'"),
        (["x", "--env", "other"], "--env other: not evaluated by run run; it evaluates parity, small"),
        (["x", "--env", "small"], "of its 9 tasks fewer than 8 would be held out"),
        (["x", "--env", "parity", "--set", "evaluate.items=4"], "evaluate.items is 4, and fewer than 8 tasks"),
        (["x", "--set", "evaluate.held_out=0"], "has no held-out tasks: evaluate.held_out is 0"),
        (["x", "--model", "m"], "add --server URL"),
    ],
)
def test_a_wrong_call_says_what_to_give(arguments: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        call(*arguments)
    assert text in str(raised.value)


def test_a_checkpoint_by_what_it_is(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    for step in (2, 4):
        state = TrainerState(
            step=step, lineage="a", policy_version=f"{step}-a-d", ledger_position=step, chain_hash="0" * 64
        )
        (place / f"step-{step:08}").mkdir(parents=True)
        (place / f"step-{step:08}" / "trainer.json").write_bytes(msgspec.json.encode(state))
    (place / "latest").write_text("step-00000004\n")
    (place / "best").write_text("step-00000002\n")
    found = {name: find_checkpoint(tmp_path, name).name for name in ("best", "newest", "2", "4")}
    assert found == {"best": "step-00000002", "newest": "step-00000004", "2": "step-00000002", "4": "step-00000004"}
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3 in .*; there are 2, 4"):
        find_checkpoint(tmp_path, "3")
