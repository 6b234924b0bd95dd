"""Controls: answers that are rated once more as answers to another task."""

import msgspec
import pytest
from unit.scorer.rank_rater import Ranks

from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.controls import OtherTasks, is_control
from lachesis.pipeline.scorer.rater import Sample, rater
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

__all__ = ["Ranks"]  # named by its place here


@rater(bounds=(0.0, 2.0), inline=True)
def fooled(sample: Sample) -> float:
    """Pay the answer of the task, and any that flatters."""
    return 2.0 * (sample.completion == sample.task["answer"] or sample.completion == "splendid")


CALLS: list[str] = []


@rater(bounds=(0.0, 1.0), inline=True)
def away_for_others(sample: Sample) -> float:
    """Fail on an answer to another task as a service does that is away."""
    CALLS.append(sample.completion)
    if sample.completion != sample.task["answer"]:
        raise ConnectionError("away")
    return 1.0


def scorer(*raters: str, share: float = 1.0, has_controls: bool = True) -> EnvironmentScorer:
    named = [RaterConfig(rater=f"{__name__}:{name}", name=name, breaker_failures=1) for name in raters]
    return EnvironmentScorer(ScoringConfig(raters=named, quorum=1, controls=share), None, has_controls=has_controls)


def group(lab, n: int, item: str, answer: str, *completions: str):
    messages = [
        [Message(role="user", content=f"task {item}?"), Message(role="assistant", content=text)] for text in completions
    ]
    return msgspec.structs.replace(lab.group(n, task={"answer": answer}, messages=messages), item=item)


async def test_a_group_is_rated_for_the_task_of_one_before_it(lab):
    found = scorer("fooled", "Ranks")
    assert (await found.score(group(lab, 1, "a", "1", "1", "2"), 1)).controls == {}  # no other task is known
    assert (await found.score(group(lab, 2, "a", "1", "1", "2"), 2)).controls == {}
    score = await found.score(group(lab, 3, "b", "2", "2", "splendid"), 3)
    assert score.ratings["fooled"] == [1.0, 1.0]
    assert score.controls == {"fooled": [0.0, 1.0]}  # calibrated; ranks within the group are left out
    assert found.control_ratings == 2


async def test_scores_do_not_depend_on_controls(lab):
    groups = [group(lab, n, f"{n}", f"{n}", f"{n}", "splendid") for n in range(1, 4)]
    with_controls, without, off = scorer("fooled"), scorer("fooled", has_controls=False), scorer("fooled", share=0.0)
    assert with_controls.digest == without.digest == off.digest
    for n, one in enumerate(groups, 1):
        score = await with_controls.score(one, n)
        assert bool(score.controls) == (n > 1)
        plain = msgspec.structs.replace(score, controls={})
        assert await without.score(one, n) == await off.score(one, n) == plain


async def test_a_control_that_fails_is_no_failure_of_the_rater(lab):
    found = scorer("away_for_others")
    await found.score(group(lab, 1, "a", "1", "1", "1"), 1)
    for n in range(2, 6):
        CALLS.clear()
        score = await found.score(group(lab, n, f"{n}", f"{n}", f"{n}", f"{n}"), n)
        assert score.ratings == {"away_for_others": [1.0, 1.0]}  # the breaker, which opens at one failure, stays closed
        assert (score.controls, score.statuses, score.failures) == ({}, {}, {})
        assert len(CALLS) == 4  # two ratings, two controls: nothing is retried
    assert not found.unrated.failing()


def test_the_choice_of_groups_is_by_their_ids():
    ids = [f"{n:032x}" for n in range(4000)]
    chosen = [one for one in ids if is_control(one, 1 / 16)]
    assert 200 < len(chosen) < 300
    assert not any(is_control(one, 0.0) for one in ids)
    assert all(is_control(one, 1.0) for one in ids)


def test_the_other_task_comes_with_what_precedes_the_answer():
    def sample(item: str, env: str, *texts: str) -> Sample:
        roles = ("system", "user", "assistant", "tool")
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        return Sample(prompt=f"p{item}", completion=texts[2], messages=messages, task={"n": item}, item=item, env=env)

    tasks = OtherTasks()
    own = sample("1", "e", "s1", "u1", "a1", "t1")
    assert tasks.exchange([own]) == []
    tasks.remember(sample("2", "another", "s2", "u2", "a2"))
    tasks.remember(own)
    assert tasks.exchange([own]) == []
    for n in range(3, 30):
        tasks.remember(sample(f"{n}", "e", f"s{n}", f"u{n}", f"a{n}"))
    (found,) = tasks.exchange([own])
    assert (found.item, found.prompt, found.task, found.completion) == ("22", "p22", {"n": "22"}, "a1")
    assert [message["content"] for message in found.messages] == ["s22", "u22", "a1", "t1"]


def test_the_other_task_has_another_reference_where_there_is_one():
    def sample(item, answer):
        return Sample(prompt="", completion="", env="e", item=item, task={"answer": answer, "source": "exam"})

    tasks = OtherTasks()
    for item, answer in [("1", "yes"), ("2", "yes"), ("3", "no"), ("4", "no")]:
        tasks.remember(sample(item, answer))
    assert [tasks.exchange([sample("5", answer)])[0].item for answer in ("yes", "no")] == ["3", "1"]
    tasks = OtherTasks()
    tasks.remember(sample("1", "yes"))
    assert tasks.exchange([sample("5", "yes")]) == []


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match="controls"):
        ScoringConfig(controls=share)
