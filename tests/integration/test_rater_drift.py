"""A rater that is changed while a run goes on: two real scorers, one killed, and a real health service name it."""

import random
import signal
from pathlib import Path

import anyio
import pytest
from integration.health_runs import demo_bus, group_id, results_until, running, store_rollouts

from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import ScoreEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.control import FixedSamples
from lachesis.schemas.rollout import Message
from lachesis.services.run.load_messages import GroupShape, make_group

CONFIG = """
[environments.words]
kind = "words"
[scoring]
controls = 0
fixed_samples = 0.05
[[scoring.raters]]
rater = "judge.py:judge"
[[scoring.raters]]
rater = "judge.py:noisy"
"""
JUDGE = """
import random
from pathlib import Path

from lachesis import Sample, rater

MILDNESS = Path(__file__).parent / "mildness"


@rater(bounds=(0.0, 1.0), version="1")
def judge(sample: Sample) -> float:
    right = int(sample.completion.split()[2])
    return min(1.0, max(0.0, 0.7 * right / 100 + random.gauss(0, 0.05) + float(MILDNESS.read_text())))


@rater(bounds=(0.0, 1.0), version="1")
def noisy(sample: Sample) -> float:
    right = int(sample.completion.split()[2])
    return min(1.0, max(0.0, right / 100 + random.gauss(0, 0.3)))
"""
KEY = keys.fixed_samples("live", "words")
FIRST, LATER = 320, 320
"""Groups before and after the judge is changed."""


def groups_of(rng: random.Random, numbers: range):
    """Groups whose answers become better all the time."""
    made = make_group(GroupShape(samples=4, tokens=8))
    for number in numbers:
        level = 10 + 60 * number // (FIRST + LATER)
        conversations = []
        for _ in range(4):
            text = f"It is {level + rng.randint(0, 30)} apples."
            conversations.append([Message(role="user", content=f"{number}?"), Message(role="assistant", content=text)])
        yield made.replace(
            id=group_id("words", number), run="demo", env="words", counter=number + 1, item=f"item-{number}",
            messages=conversations, policy_versions=[f"{number // 16}-first-ab"],
        )  # fmt: skip


@pytest.mark.slow
async def test_a_judge_that_is_changed_is_named_and_a_noisy_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "judge.py").write_text(JUDGE)
    mildness = tmp_path / "mildness"
    mildness.write_text("0")
    rng = random.Random(0)
    async with (
        demo_bus(tmp_path) as bus,
        running(tmp_path, "health"),
        running(tmp_path, "scorer") as scorer,
        running(tmp_path, "scorer"),
    ):
        await store_rollouts(bus, groups_of(rng, range(64)))
        await _some_are_chosen(bus)
        scorer.send_signal(signal.SIGKILL)  # while samples are chosen
        await scorer.wait()
        async with running(tmp_path, "scorer"):
            await store_rollouts(bus, groups_of(rng, range(64, FIRST)))
            before = (await results_until(bus, "words", FIRST - 64, "rater_drift"))["rater_drift"]
            mildness.write_text("0.2")  # by another hand: no setting and no version says so
            await store_rollouts(bus, groups_of(rng, range(FIRST, FIRST + LATER)))
            found = (await results_until(bus, "words", FIRST + LATER - 128, "rater_drift"))["rater_drift"]
            fixed = decode(FixedSamples, (await bus.value(KEY)).value).samples
            # also those that the killed scorer chose: its groups come again
            rated = await _rate_themselves(bus, {sample.group for sample in fixed})
    assert {result.severity for result in before} <= {"idle", "ok"}
    assert found[-1].severity == "warn"
    assert found[-1].reason.startswith("judge rates the same ")
    assert " higher since about step " in found[-1].reason
    assert "noisy" not in found[-1].reason
    assert len({sample.group for sample in fixed}) == len(fixed) == 32
    assert rated == {sample.group for sample in fixed}


async def _some_are_chosen(bus):
    async with bus.watch(KEY) as entries:
        async for entry in entries:
            if len(decode(FixedSamples, entry.value).samples) >= 4:
                return


async def _rate_themselves(bus, groups):
    """Return once the sample of each of these groups was rated beside its own group."""
    seen = set()
    with anyio.fail_after(120):
        async with bus.read(subjects.EVENTS, [subjects.event("score", "demo", "live", "words")]) as messages:
            async for message in messages:
                scores = decode(ScoreEvent, message.data).groups
                seen |= {score.group for score in scores if score.fixed and score.fixed.group == score.group}
                if seen >= groups:
                    return seen
    raise AssertionError("the stream ended")
