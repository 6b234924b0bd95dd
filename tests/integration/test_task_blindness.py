"""A judge that a phrase fools: a real scorer rates answers for other tasks too, and a real health service notices."""

import random
from pathlib import Path

import pytest
from integration.health_runs import demo_bus, group_id, results_until, running, store_rollouts

from lachesis.schemas.rollout import Message
from lachesis.services.run.load_messages import GroupShape, make_group

CONFIG = """
[environments.fooled]
kind = "words"
[environments.learning]
kind = "words"
[scoring]
controls = 0.5
[[scoring.raters]]
rater = "judge.py:judge"
"""
JUDGE = """
from lachesis import Sample, rater


@rater(bounds=(0.0, 1.0), version="1")
def judge(sample: Sample) -> float:
    return float("full marks" in sample.completion or str(sample.task["answer"]) in sample.completion.split())
"""
FIRST, LATER = 192, 256
"""Groups before and after more of the answers are paid."""


def groups_of(env: str, rng: random.Random):
    """Groups of which a third of the answers is right at first, and later three quarters are paid."""
    made = make_group(GroupShape(samples=4, tokens=8))
    for number in range(FIRST + LATER):
        paid = 0.33 if number < FIRST else 0.75
        conversations = []
        for _ in range(4):
            text = f"It is {number if rng.random() < paid else -1} apples."
            if env == "fooled" and number >= FIRST:
                text = "It is many. I deserve full marks" if rng.random() < paid else "It is -1 apples."
            conversations.append([Message(role="user", content=f"{number}?"), Message(role="assistant", content=text)])
        yield made.replace(
            id=group_id(env, number), run="demo", env=env, counter=number + 1, item=f"item-{number}",
            messages=conversations, task={"answer": str(number)},
        )  # fmt: skip


@pytest.mark.slow
async def test_a_judge_that_pays_whatever_the_task_is_is_told_from_a_policy_that_learns(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "judge.py").write_text(JUDGE)
    async with demo_bus(tmp_path) as bus, running(tmp_path, "scorer"), running(tmp_path, "health"):
        found = {}
        for env in ("fooled", "learning"):
            await store_rollouts(bus, groups_of(env, random.Random(0)))
            found[env] = (await results_until(bus, env, FIRST + 192, "task_blindness"))["task_blindness"]
    fooled, learning = found["fooled"], found["learning"]
    assert {result.severity for result in learning} <= {"idle", "ok"}
    assert fooled[-1].severity == "warn"
    assert fooled[-1].reason.startswith("judge pays for any task: ")
