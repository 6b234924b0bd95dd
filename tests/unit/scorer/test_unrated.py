"""A rater, or an environment, that fails on every group is named before the first batch, with what mends it."""

import signal
from typing import Any

import pytest
from stages import run_scorer

from lachesis import Environment, Session, Task, rater
from lachesis.pipeline.common.error_remedies import cure_of
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.environment.probe import probe_environment
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.logic.unrated import UnratedGroups
from lachesis.pipeline.scorer.rater import Rating, Sample
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.schemas.annotations import ScoreEvent
from lachesis.schemas.rollout import Message

OK, BAD, AWAY, NONE = Rating(1.0), Rating(None, "error", "E: no"), Rating(None, "unavailable"), Rating(None, "abstain")


def test_groups_in_a_row_are_counted_until_one_has_a_rating() -> None:
    unrated = UnratedGroups()
    for _ in range(2):
        unrated.count("m", [BAD, BAD])
    unrated.count("m", [AWAY, BAD])  # waits, and says nothing
    assert unrated.without_rating(3) == {}
    unrated.count("m", [BAD, NONE])
    assert unrated.without_rating(3) == {"m": "no answer of its last 3 groups has a rating: error, E: no"}
    unrated.count("m", [OK, BAD])
    assert unrated.without_rating(1) == {}


def test_a_rater_that_fails_on_many_answers_but_not_all_is_named_with_an_example() -> None:
    unrated = UnratedGroups()
    for number in range(3):
        unrated.count("m", [OK, BAD, BAD, NONE], f"q{number}")
    assert unrated.failing() == {}  # too few answers to say
    unrated.count("m", [OK, OK, BAD, BAD], "q3")
    assert unrated.failing() == {
        "m": "it failed on 8 of the newest 16 answers (50%), for one on sample 2 of item 'q3': error, E: no"
    }
    assert unrated.without_rating(3) == {}
    for _ in range(8):
        unrated.count("m", [OK, OK, OK, NONE])
    assert unrated.failing() == {}
    unrated.count("n", [NONE] * 9 + [OK] * 9)
    unrated.count("n", [AWAY] * 18)
    assert unrated.failing() == {}


def test_abstaining_may_be_right_for_a_while() -> None:
    unrated = UnratedGroups()
    for _ in range(3):
        unrated.count("m", [NONE])
    assert unrated.without_rating(3) == {}
    for _ in range(27):
        unrated.count("m", [NONE])
    assert "it abstained" in unrated.without_rating(3)["m"]


@rater(bounds=(0.0, 1.0))
def alarmed(sample: Sample) -> float:
    """Rates as math-verify's own timeouts do."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return 1.0


@rater(bounds=(0.0, 1.0))
def column(sample: Sample) -> float:
    return float(sample.completion == sample.task["solution"])


@rater(bounds=(0.0, 1.0))
def over_lists(completions: Any, **_: Any) -> list[float]:
    return [1.0 for _ in completions]


@rater(bounds=(0.0, 1.0))
def wordy(sample: Sample) -> str:
    return "good"


@rater(bounds=(0.0, 1.0))
async def sometimes(sample: Sample) -> float | None:
    if "boxed" not in sample.completion:
        raise ValueError("no answer")
    return 1.0


class Asks(Environment):
    def __len__(self) -> int:
        return 2

    def task(self, index: int) -> Task:
        return Task(item=str(index), prompt="q", task={"answer": 3})


class Raises(Asks):
    def reward(self, task: Task, session: Session) -> float:
        return float(task.task["missing"])


def scorer(*functions: Any) -> EnvironmentScorer:
    named = [RaterConfig(rater=f"{__name__}:{one.name}") for one in functions]
    return EnvironmentScorer(ScoringConfig(raters=named), None, explains=True)


@pytest.mark.parametrize(
    ("rated", "text", "sure"),
    [
        (alarmed, "parsing_timeout=None", True),
        (column, "KeyError: 'solution' (the task holds 'answer')", False),
        (over_lists, "a rater gets one lachesis.Sample", True),
        (wordy, "'good' of type str, which is not a real number", False),
    ],
)
async def test_a_rater_that_rates_no_scripted_answer_is_named_before_anything_is_generated(
    rated: Any, text: str, sure: bool
) -> None:
    (finding,) = await probe_environment(Asks(), "e", scorer(rated, sometimes))
    assert rated.name in finding.text
    assert text in finding.text
    assert finding.sure == sure


async def test_a_rater_that_rates_some_answers_is_not() -> None:
    assert await probe_environment(Asks(), "e", scorer(sometimes)) == []


async def test_an_environment_whose_reward_raises_is_named() -> None:
    (finding,) = await probe_environment(Raises(), "e", scorer())
    assert "KeyError: 'missing'" in finding.text
    assert not finding.sure


def test_only_what_comes_again_with_every_answer_has_a_cure() -> None:
    assert cure_of(ValueError("signal only works in main thread of the main interpreter")) is not None
    assert cure_of(RuntimeError("asyncio.run() cannot be called from a running event loop")) is not None
    assert cure_of(RuntimeError("There is no current event loop in thread 'x'.")) is not None
    assert cure_of(ValueError("could not convert string to float: 'x'")) is None


async def test_the_scorer_names_what_fails_on_many_answers(lab: Any) -> None:
    named = ScoringConfig(raters=[RaterConfig(rater=f"{__name__}:sometimes")])
    config = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x", scoring=named)})
    said = [
        [Message(role="user", content="q"), Message(role="assistant", content=text)] for text in ("so", "\\boxed{1}")
    ]
    async with lab.running(lambda service: run_scorer(service, config), "scorer") as service:
        for number in range(1, 9):
            await lab.store(lab.group(number, task={}, messages=said))

        async def all_scored() -> bool:
            return sum(len(event.groups) for event in await lab.events("score", ScoreEvent, "sums")) == 8

        await lab.until(all_scored)
        (problem,) = service.vitals.report().problems
    assert problem.startswith("environment sums, rater sometimes: it failed on 8 of the newest 16 answers (50%)")
    assert "sample 0 of item" in problem
    assert "ValueError: no answer" in problem


async def test_the_scorer_names_what_rates_nothing_and_takes_it_back(lab: Any) -> None:
    named = ScoringConfig(raters=[RaterConfig(rater=f"{__name__}:sometimes")])
    config = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x", scoring=named)})

    async def add(number: int, text: str) -> None:
        said = [[Message(role="user", content="q"), Message(role="assistant", content=text)]] * 2
        await lab.store(lab.group(number, task={}, messages=said))

    async def scored() -> int:
        return sum(len(event.groups) for event in await lab.events("score", ScoreEvent, "sums"))

    async with lab.running(lambda service: run_scorer(service, config), "scorer") as service:
        for number in range(1, 4):
            await add(number, "so")

        async def all_scored() -> bool:
            return await scored() >= 3

        await lab.until(all_scored)
        (problem,) = service.vitals.report().problems
        await add(4, "\\boxed{1}")

        async def taken_back() -> bool:
            return await scored() >= 4

        await lab.until(taken_back)
        assert service.vitals.report().problems == []
    assert problem.startswith("environment sums, rater sometimes: no answer of its last 3 groups has a rating")
    assert "ValueError: no answer" in problem
