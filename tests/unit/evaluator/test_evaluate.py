"""Evaluation: rates worked out by hand, and versions that are never mixed in silence."""

from pathlib import Path

import pytest

from lachesis import Environment, Session, Task
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.errors import EnvironmentCodeError, InfrastructureError, PolicyMovedError
from lachesis.pipeline.evaluator.evaluate import evaluate
from lachesis.schemas.errors import ConfigError, DataError

SUMS = f"{Path(__file__).parents[2] / 'examples' / 'sums.py'}:Sums"


def counting(prompt: str, right: dict[str, list[str]]) -> str:
    return next(answers.pop(0) for question, answers in right.items() if question in prompt)


async def test_rates_of_a_known_case() -> None:
    answers = {"1+0?": ["1", "2", "1", "7", "1"], "1+1?": ["0", "0", "0", "0", "2"]}  # four samples, then greedy
    inference = FakeInference(lambda prompt, call: counting(prompt, answers))
    result = await evaluate(load_environment(SUMS, {"largest": 9}), inference, k=4, items=[10, 11])
    assert (result.items, result.k, result.unjudged) == (2, 4, 0)
    assert result.avg_at_k == 2 / 8
    assert result.pass_at_k == 1 / 2
    assert result.greedy == 1.0
    assert result.mean_score == 2 / 8
    assert result.mean_tokens == 2.0
    assert result.versions == {"0-fake-0000": 10}
    assert result.policy_version == "0-fake-0000"
    temperatures = {sampling.temperature for _, _, sampling in inference.requests}
    assert temperatures == {1.0, 0.0}


async def test_the_first_tasks_are_kept_with_their_greedy_answers() -> None:
    def answer(prompt: str, call: int) -> str:
        return "3" if "1+2?" in prompt else "7" * 2000

    inference = FakeInference(answer)
    result = await evaluate(load_environment(SUMS, {"largest": 9}), inference, k=1, items=[12, *range(20, 30)])
    assert [example.task for example in result.examples] == [12, 20, 21, 22]
    first, second = result.examples[:2]
    assert ("1+2?" in first.prompt, first.answer, first.score) == (True, "3", 1.0)
    assert (len(second.answer), second.score) == (1000, 0.0)
    sampled = await evaluate(load_environment(SUMS, {"largest": 9}), inference, k=1, items=[12], greedy=False)
    assert sampled.examples == []


async def test_threshold_and_score_of_the_callers_choice() -> None:
    async def half(task: Task, session: Session) -> float:
        return 0.5

    env = load_environment(SUMS, {"largest": 9})
    options = {"items": [1], "score": half, "greedy": False}
    low = await evaluate(env, FakeInference(lambda *_: "x"), threshold=0.5, **options)
    high = await evaluate(env, FakeInference(lambda *_: "x"), threshold=0.6, **options)
    assert (low.avg_at_k, high.avg_at_k, low.greedy) == (1.0, 0.0, None)


async def test_scores_whose_sum_is_no_number_have_a_mean() -> None:
    async def largest(task: Task, session: Session) -> float:
        return 1.7e308

    env = load_environment(SUMS, {"largest": 9})
    result = await evaluate(env, FakeInference(lambda *_: "x"), k=4, items=[1], score=largest, greedy=False)
    assert (result.mean_score, result.avg_at_k) == (1.7e308, 1.0)


async def test_a_missing_score_is_not_a_failure_of_the_model() -> None:
    scores: list[float | None] = [1.0, None, 0.0, None, 0.0, 0.0]

    async def score(task: Task, session: Session) -> float | None:
        return scores.pop(0)

    env = load_environment(SUMS, {"largest": 9})
    result = await evaluate(
        env, FakeInference(lambda *_: "x"), k=2, items=[0, 1, 2], score=score, greedy=False, concurrency=1
    )
    assert result.unjudged == 2
    assert result.avg_at_k == 1 / 4
    assert result.pass_at_k == 1 / 2, "the second item may have had a success, so it is left out"


async def test_a_pinned_evaluation_refuses_another_version() -> None:
    inference = FakeInference(lambda prompt, call: "x")

    def moving(prompt: str, call: int) -> str:
        inference.version = "1-main-aa" if call < 5 else "2-main-bb"
        return "x"

    inference.reply = moving
    env = load_environment(SUMS, {"largest": 9})
    with pytest.raises(PolicyMovedError, match="evaluation of 1-main-aa got tokens of 2-main-bb"):
        await evaluate(env, inference, items=range(8), policy_version="1-main-aa", concurrency=1)


async def test_an_unpinned_evaluation_names_all_versions() -> None:
    inference = FakeInference(lambda prompt, call: "x")

    def moving(prompt: str, call: int) -> str:
        inference.version = "10-main-aa" if call >= 3 else "9-main-bb"
        return "x"

    inference.reply = moving
    env = load_environment(SUMS, {"largest": 9})
    result = await evaluate(env, inference, k=2, items=range(3), greedy=False, concurrency=1)
    assert list(result.versions) == ["9-main-bb", "10-main-aa"], "oldest first, by step"
    assert sum(result.versions.values()) == 6
    assert result.policy_version is None


async def test_bugs_are_unjudged_and_all_bugs_are_raised() -> None:
    class Odd(Environment):
        def __len__(self) -> int:
            return 2

        def task(self, index: int) -> Task:
            return Task(item=str(index), prompt=str(index))

        def reward(self, task: Task, session: Session) -> float:
            return 1 / int(task.item)

    result = await evaluate(Odd(), FakeInference(lambda *_: "x"), k=2)
    assert (result.avg_at_k, result.pass_at_k, result.greedy, result.unjudged) == (1.0, 1.0, 1.0, 3)
    with pytest.raises(EnvironmentCodeError):
        await evaluate(Odd(), FakeInference(lambda *_: "x"), k=2, items=[0])


async def test_failures_and_senseless_requests_are_raised() -> None:
    def down(prompt: str, call: int) -> str:
        raise InfrastructureError("down")

    from lachesis.pipeline.environment.config import CollectConfig

    env = load_environment(SUMS, {"largest": 9})
    with pytest.raises(InfrastructureError, match="down"):
        await evaluate(env, FakeInference(down), items=[0], config=CollectConfig(attempts=1))
    with pytest.raises(ConfigError, match="no items"):
        await evaluate(env, FakeInference(down), items=[])
    with pytest.raises(ConfigError, match="k and concurrency"):
        await evaluate(env, FakeInference(down), k=0)


async def test_an_environment_with_several_rewards_must_say_what_success_is() -> None:
    class Two(Environment):
        def __len__(self) -> int:
            return 1

        def task(self, index: int) -> Task:
            return Task(item="0", prompt="q")

        def reward(self, task: Task, session: Session) -> dict[str, float]:
            return {"a": 1.0, "b": 0.0}

    with pytest.raises(ConfigError, match="2 rewards"):
        await evaluate(Two(), FakeInference(lambda *_: "x"))


async def test_an_item_that_fails_is_skipped_only_if_the_caller_wants_to_know() -> None:
    def answer(prompt: str, call: int) -> str:
        if "1+2?" in prompt:
            raise DataError("refused")
        return "3"

    skipped: list[tuple[int, str]] = []
    env = load_environment(SUMS, {"largest": 9})
    options = {"k": 2, "items": [12, 21, 30]}
    result = await evaluate(
        env, FakeInference(answer), skip=lambda index, error: skipped.append((index, str(error))), **options
    )
    assert sorted(set(skipped)) == [(12, "refused")]
    assert (result.avg_at_k, result.greedy, result.unjudged) == (1.0, 1.0, 3)
    assert result.tasks == {12: (0, 0), 21: (2, 2), 30: (2, 2)}
    with pytest.raises(DataError, match="refused"):
        await evaluate(env, FakeInference(answer), **options)
    with pytest.raises(PolicyMovedError):
        await evaluate(env, FakeInference(answer), policy_version="1-a-b", skip=lambda *_: None, **options)
