"""`lachesis rollouts GROUP` says what a reward is where it is not the score."""

import msgspec
import pytest

from lachesis.services.cli import rollouts
from lachesis.services.observe.groups import GroupRow, GroupView, SampleView

ROW = GroupRow(
    group="0" * 32,
    seq=1,
    env="words",
    item="a",
    stored_ns=0,
    policy_step=0,
    samples=1,
    tokens=3,
    state="trained",
    reason=None,
    step=1,
    score=1.0,
    low=1.0,
    high=1.0,
    disagreement=None,
    advantage=0.5,
)


def view(reward: float | None) -> GroupView:
    sample = SampleView(
        messages=[],
        finish_reason="stop",
        tokens=3,
        sequences=1,
        logprob=None,
        score=1.0,
        ratings={},
        statuses={},
        reward=reward,
        advantage=0.5,
        rewards={},
        excluded=False,
        figures={"judge/flipped": 0.25},
    )
    return GroupView(
        row=ROW,
        item="a",
        task={},
        skill=None,
        difficulty=None,
        policy_versions=["0-a-b"],
        prompt=[],
        samples=[sample],
        failures={},
        left_out={2: "the agent reported no reward"},
        verdict=None,
    )


@pytest.mark.parametrize(("reward", "says"), [(2.07, True), (1.0, False), (None, False)])
def test_a_reward_that_is_not_the_score_is_explained(
    reward: float | None, says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts._print_group(view(reward))
    assert ("a reward is the score as normalization" in capsys.readouterr().out) is says


def test_what_raters_say_further_is_shown_with_the_sample(capsys: pytest.CaptureFixture[str]) -> None:
    rollouts._print_group(view(1.0))
    assert "judge/flipped 0.25" in capsys.readouterr().out


def test_a_sample_that_was_left_out_is_shown_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    rollouts._print_group(view(1.0))
    shown = " ".join(capsys.readouterr().out.split())
    assert "sample 2 of the request failed and is left out: the agent reported no reward" in shown


@pytest.mark.parametrize(
    ("state", "step", "text"),
    [
        ("trained", 3, "trained in step 3"),
        ("batched", 3, "batched for step 3"),
        ("left over", 3, "left over: its batch came after the last step"),
        ("left over", None, "left over"),
    ],
)
def test_a_step_is_named_only_where_it_was_or_will_be_taken(state: str, step: int | None, text: str) -> None:
    assert rollouts._state(msgspec.structs.replace(ROW, state=state, step=step)) == text
