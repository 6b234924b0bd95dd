"""Checks of an environment: a good one passes all, and each broken one fails its own check with its own message."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.probe import probe_environment
from lachesis.pipeline.environment.verify import CHECKS, EnvironmentCheck, verify_environment
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.services.cli.environments import env_app

pytestmark = pytest.mark.outside

GOOD = """
import random
from lachesis import Environment, Task


def named(item, prompt):
    return Task(item=item, prompt=prompt, task={"answer": "1"})


class Good(Environment):
    def __len__(self):
        return 20

    def task(self, index):
        return Task(item=str(index), prompt=f"double {index}", task={"answer": str(2 * index)})

    def reward(self, task, session):
        return float(session.text.strip() == task.task["answer"])
"""
BROKEN = {
    "loads": ("    def __init__(self):\n        self.words = open('nowhere.txt').read()", "FileNotFoundError"),
    "prompts": (
        "    def task(self, index):\n        return Task(item='same', prompt='a')",
        "have the same item 'same'",
    ),
    "parses": (
        "    def reward(self, task, session):\n        return float(session.text)",
        "an empty answer to item '0'",
    ),
    "scores": (
        "    def reward(self, task, session):\n        return float('nan')",
        "a reward is a finite number or None",
    ),
    "deterministic": (
        "    def task(self, index):\n        return named(str(hash(f'a{index}')), 'a')",
        "is another task in another process",
    ),
    "resets": (
        "    n = 0\n    def reward(self, task, session):\n        self.n += 1\n        return float(self.n > 2)",
        "keep a sample's state in session.state",
    ),
}
ODDER = {
    "no text": (
        "    def task(self, index):\n        return Task(item=str(index), prompt=' ')",
        "prompts",
        "prompt is empty",
    ),
    "no task": ("    def task(self, index):\n        return str(index)", "prompts", "returned a str"),
    "unstorable": (
        "    def task(self, index):\n        return Task(item=str(index), prompt='a', task={'it': object()})",
        "prompts",
        "cannot be stored",
    ),
    "no number": (
        "    def reward(self, task, session):\n        return 'good'",
        "scores",
        "reward environment is 'good'",
    ),
    "nothing known": ("    def reward(self, task, session):\n        return None", "scores", "returned None for all"),
    "random task": (
        "    def task(self, index):\n        return named(str(index), f'{random.random()}')",
        "deterministic",
        "at the next call",
    ),
    "random reward": (
        "    def reward(self, task, session):\n        return random.random()",
        "deterministic",
        "for the same answer",
    ),
}


async def checked(tmp_path: Path, body: str) -> dict[str, EnvironmentCheck]:
    file = tmp_path / "mine.py"
    file.write_text(f"{GOOD}\n\nclass Mine(Good):\n{body}\n")
    checks = await verify_environment(f"{file}:Mine")
    assert tuple(check.check for check in checks) == CHECKS
    return {check.check: check for check in checks}


@pytest.mark.slow
async def test_a_good_environment_passes_all(tmp_path: Path) -> None:
    checks = await checked(tmp_path, "    pass")
    assert {check.verdict for check in checks.values()} == {"ok"}, checks
    assert "rewards from 0 to 1" in checks["scores"].text


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
async def test_each_fault_fails_its_own_check(check: str, tmp_path: Path) -> None:
    body, text = BROKEN[check]
    checks = await checked(tmp_path, body)
    assert [name for name, found in checks.items() if found.verdict == "fail"] == [check], checks
    assert text in checks[check].text


@pytest.mark.slow
@pytest.mark.parametrize("fault", ODDER)
async def test_further_faults(fault: str, tmp_path: Path) -> None:
    body, check, text = ODDER[fault]
    checks = await checked(tmp_path, body)
    assert [name for name, found in checks.items() if found.verdict == "fail"] == [check], checks
    assert text in checks[check].text


async def test_a_bug_that_shows_in_a_second_instance_alone_is_a_failure_and_never_raises(tmp_path: Path) -> None:
    body = "    made = []\n    def __init__(self):\n        self.made.append(1)\n        assert len(self.made) == 1"
    checks = await checked(tmp_path, body)
    assert checks["deterministic"].verdict == "fail"
    assert "AssertionError" in checks["deterministic"].text
    assert checks["resets"].verdict == "skipped"


async def test_what_a_failure_leaves_unknown_is_skipped(tmp_path: Path) -> None:
    checks = await checked(tmp_path, BROKEN["loads"][0])
    assert [check.verdict for check in checks.values()] == ["fail", *["skipped"] * 5]


@pytest.mark.slow
async def test_what_is_doubtful_in_a_data_set_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("prompt,answer\na,1\na,2\nb,null\n")
    checks = await verify_environment("dataset", {"path": str(file)})
    (loads,) = (one for one in checks if one.check == "loads")
    assert loads.verdict == "ok"
    assert "Dataset, 2 tasks; " in loads.text
    assert "1 rows contradict an earlier one" in loads.text
    assert "1 of 3 answers are 'null'" in loads.text


@pytest.mark.slow
async def test_a_builtin_one_that_leaves_rewards_to_raters_passes() -> None:
    checks = await verify_environment("spell_backward", {"size": 30})
    assert {check.verdict for check in checks} == {"ok"}, checks
    assert "leaves rewards to raters" in checks[3].text


@pytest.mark.slow
def test_the_command_prints_a_table_and_exits_with_one_on_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{GOOD}\n\nclass Mine(Good):\n{BROKEN['scores'][0]}\n")
    good, bad, missing = (
        CliRunner().invoke(env_app, ["verify", f"{file}:{name}"]) for name in ("Good", "Mine", "Mina")
    )
    assert (good.exit_code, bad.exit_code, missing.exit_code) == (0, 1, 1)
    assert "fail     scores" in bad.output
    assert "did you mean 'Mine'" in missing.output


RUNNING = """
from contextlib import asynccontextmanager

class Runs(Good):
    up = False

    @asynccontextmanager
    async def running(self):
        self.up = True
        yield
        self.up = False

    async def rollout(self, task, session):
        assert self.up, "it runs nothing beside its samples"
        await super().rollout(task, session)
"""


@pytest.mark.slow
async def test_what_an_environment_runs_beside_its_samples_is_up_in_verify_and_doctor(tmp_path: Path) -> None:
    (tmp_path / "runs.py").write_text(GOOD + RUNNING)
    kind = f"{tmp_path}/runs.py:Runs"
    assert [check.text for check in await verify_environment(kind, {}) if check.verdict == "fail"] == []
    scorer = EnvironmentScorer(ScoringConfig(raters=[RaterConfig(rater="exact_match")]), None, explains=True)
    assert await probe_environment(load_environment(kind, {}), "runs", scorer) == []
