"""`lachesis dev` as a user meets it: an environment or a rater that breaks, fails, hangs, or does nothing."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from lachesis.pipeline.model.policy import build_tiny_policy, save_policy

pytestmark = pytest.mark.timeout(300)

CODE = """
import time
import anyio
from lachesis import Environment, Session, Task, estimator, rater

class Counts(Environment):
    def __len__(self):
        return 4
    def task(self, index):
        return Task(item=f"{index}", prompt=f"Say {index}")
    def reward(self, task, session):
        return float(len(session.text) + session.sample)

class Breaks(Counts):
    def reward(self, task, session):
        if session.sample == 1:
            breakpoint()
        return 1.0 * session.sample

class Raises(Counts):
    def reward(self, task, session):
        return {}["no such key"]

class RaisesOnce(Counts):
    def reward(self, task, session):
        if session.sample == 2:
            raise ValueError("not this one")
        return 1.0 * session.sample

class SaysNothing(Counts):
    async def rollout(self, task, session):
        return

class HasNoTask(Counts):
    def task(self, index):
        raise LookupError("the file of tasks is gone")

class WaitsForever(Counts):
    rollout_timeout_s = 1
    async def rollout(self, task, session):
        await anyio.sleep_forever()

class Away(Counts):
    def reward(self, task, session):
        raise ConnectionError("the judge of rewards is away")

class Forks(Counts):
    async def rollout(self, task, session):
        branches = [session.fork() for _ in range(2)]
        await session.generate()
        for branch in branches:
            branch.reward_turn(len((await branch.generate()).text) / 8)

class Indifferent(Counts):
    def reward(self, task, session):
        return 1.0

@estimator
def divides(group):
    return [reward / 0 for reward in group.rewards]

@rater(bounds=(0.0, 1.0))
def breaks(sample):
    value = ord(sample.completion[0]) / 200
    breakpoint()
    return value

@rater(bounds=(0.0, 1.0))
def raises(sample):
    return [][sample.token_count]

@rater(bounds=(0.0, 1.0))
def hangs(sample):
    while True:
        time.sleep(0.01)

@rater(bounds=(0.0, 1.0))
async def is_away(sample):
    raise ConnectionError("the judge is away")
"""
CONFIG = """
model = "model"
[environments.counts]
kind = "mine.py:{environment}"
samples = 4
max_new_tokens = 8
longest_tokens = 64
[scoring]
patience_s = 0.1
raters = [{raters}]
[advantage]
estimator = "{estimator}"
"""


def line(text: str) -> int:
    """Where `text` stands in the user's file, from 1."""
    return next(i for i, one in enumerate(CODE.splitlines(), 1) if text in one)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user")
    (path / "mine.py").write_text(CODE)
    save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=64), path / "model")
    return path


def dev(
    folder: Path, environment: str = "Counts", rater: str = "", *, estimator: str = "centred", said: str = ""
) -> Ended:
    about = f'{{ rater = "mine.py:{rater}", timeout_s = 2, retries = 0 }}' if rater else ""
    file = folder / f"{environment}{rater}.toml"
    file.write_text(CONFIG.format(environment=environment, raters=about, estimator=estimator))
    command = [sys.executable, "-m", "lachesis", "dev", "counts", "--config", file.name]
    done = subprocess.run(
        command,
        cwd=folder,
        input=said,
        text=True,
        capture_output=True,
        check=False,
        timeout=250,
        env={**os.environ, "COLUMNS": "300"},
    )
    assert not (folder / "runs").exists()
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_a_breakpoint_in_an_environment_stops_there_and_goes_on(folder: Path) -> None:
    code, out, err = dev(folder, "Breaks", said="p task.item, session.sample\nw\nc\n")
    assert code == 0, err
    assert "('0', 1)" in out
    assert f"mine.py({line('breakpoint()') + 1})reward()" in out
    assert out.count("(Pdb)") == 3
    assert "optimizer step" in out


@pytest.mark.slow
def test_a_breakpoint_in_a_rater_stops_at_one_sample_after_another_for_as_long_as_it_takes(folder: Path) -> None:
    code, out, err = dev(folder, rater="breaks", said="p value\nimport time; time.sleep(3)\nc\n" + "p value\nc\n" * 3)
    assert code == 0, out + err
    assert out.count(f"mine.py({line('return value')})breaks()") == 4
    assert "missing" not in out
    assert "optimizer step" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "rater", "shown", "said"),
    [
        ("Raises", "", "KeyError: 'no such key'", "no group: Raises failed on 4 of 4 samples"),
        ("SaysNothing", "", "", "rollout ended before the model said anything"),
        ("HasNoTask", "", "LookupError: the file of tasks is gone", "no group: HasNoTask.task(0)"),
        ("WaitsForever", "", "", "a sample took longer than 1 s"),
        ("Away", "", "ConnectionError: the judge of rewards is away", "no group: Away.reward"),
        ("Indifferent", "", "", "verdict zero_variance: nothing to train on"),
        ("Counts", "raises", "IndexError: list index out of range", "verdict unscorable"),
        ("Counts", "hangs", "time.sleep(0.01)", "verdict unscorable (0 of 4 samples have a reward; rater hangs: no"),
        ("Counts", "is_away", "ConnectionError: the judge is away", "no group: scorer"),
    ],
)
def test_what_fails_is_shown_and_ends_it(folder: Path, environment: str, rater: str, shown: str, said: str) -> None:
    code, out, err = dev(folder, environment, rater)
    assert code == 1, out + err
    assert said in out
    assert shown in err
    assert err.count("Traceback") == bool(shown and rater != "hangs")
    assert "lachesis/pipeline" not in err, "the user's frames alone"


@pytest.mark.slow
def test_a_sample_that_fails_is_left_out_with_its_reason(folder: Path) -> None:
    code, out, err = dev(folder, "RaisesOnce")
    assert code == 0, err
    assert f"sample 2 is left out: ValueError: not this one (mine.py:{line('not this one')} in reward)" in out
    assert "optimizer step" in out
    assert err.startswith("RaisesOnce, item '0', sample 2:\nTraceback")


@pytest.mark.slow
def test_branches_and_the_rewards_of_their_turns_are_shown_and_trained(folder: Path) -> None:
    code, out, err = dev(folder, "Forks")
    assert code == 0, err
    assert "branches ┃ turn rewards" in out
    assert "turn advantages" in out
    assert "optimizer step" in out


@pytest.mark.slow
def test_an_estimator_that_fails_is_shown_with_its_place(folder: Path) -> None:
    code, out, err = dev(folder, estimator="mine.py:divides")
    assert code == 1, err
    assert "verdict quarantined (estimator mine.py:divides@1: ZeroDivisionError" in out
    assert f'mine.py", line {line("reward / 0")}, in divides' in err
    assert "lachesis/pipeline" not in err
