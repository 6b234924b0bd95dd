"""What keeps groups from being made is counted, reported once, and not drawn again where no other try will help."""

import logging
from typing import Any

import pytest

from lachesis import Environment, Session, Task
from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.failures import GroupFailures
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.rollout import describe_error
from lachesis.pipeline.errors import EnvironmentCodeError, PromptTooLongError
from lachesis.pipeline.evaluator.evaluate import evaluate
from lachesis.pipeline.runtime.service_metrics import ServiceMetrics
from lachesis.schemas.errors import DataError


class Service:
    """What `GroupFailures` uses of one."""

    def __init__(self) -> None:
        self.vitals = ServiceMetrics()

    def set_note(self, topic: str, text: str | None) -> None:
        if text is None:
            self.vitals.notes.pop(topic, None)
        else:
            self.vitals.notes[topic] = text

    def set_problem(self, topic: str, text: str | None) -> None:
        if text is None:
            self.vitals.problems.pop(topic, None)
        else:
            self.vitals.problems[topic] = text


@pytest.fixture
def failures() -> GroupFailures:
    service: Any = Service()
    return GroupFailures(service, "e", 10)


def test_each_reason_is_logged_once(failures: GroupFailures, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lachesis")
    for number in range(5):
        failures.count_failed("a", DataError(f"item 'x{number}' has {number} sequences"), 20)
        failures.count_failed("a", EnvironmentCodeError("E.reward: KeyError"), 20)
    assert len(caplog.records) == 2
    assert failures.in_a_row == 10
    failures.count_made(0)
    assert failures.in_a_row == 0


def test_what_an_agent_wrote_makes_no_other_reason_and_no_traceback_of_this_project(
    failures: GroupFailures, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lachesis")
    for wrote in ("4 + 7", "it is 11"):
        error = EnvironmentCodeError(f"Agent failed on item 'x': no reward; it wrote at last:\n{wrote}")
        with pytest.raises(AttributeError) as raised:
            describe_error(None)  # type: ignore[arg-type]
        cause = raised.value
        assert cause.__traceback__ is not None
        error.__cause__ = cause.with_traceback(cause.__traceback__.tb_next)  # without this test's own line
        failures.count_failed("a", error, 20)
    (record,) = caplog.records
    assert record.exc_info is None or record.exc_info[1] is None


def test_a_traceback_with_a_line_of_the_environments_own_code_is_logged(
    failures: GroupFailures, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lachesis")
    namespace: dict[str, Any] = {}
    exec(compile("def reward(task):\n    return task['answer']", "/home/me/mine.py", "exec"), namespace)  # noqa: S102
    error = EnvironmentCodeError("Mine.reward: KeyError")
    with pytest.raises(KeyError) as raised:
        namespace["reward"]({})
    error.__cause__ = raised.value
    failures.count_failed("a", error, 20)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is raised.value


def test_samples_that_the_code_of_an_environment_cost_are_counted_and_named(failures: GroupFailures) -> None:
    service: Any = failures._service
    failures.count_made(0)
    assert not service.vitals.problems
    failures.count_made(0, ["E.reward: [1] is\nno number", "E.reward: [2] is no number"])
    assert service.vitals.metrics["environment/e/failed_samples"] == 2
    (problem,) = service.vitals.problems.values()
    assert "2 samples of 2 groups were left out" in problem
    assert "the first: E.reward: [1] is no number" in problem


def test_groups_that_fail_in_a_row_are_said_until_one_is_made(failures: GroupFailures) -> None:
    service: Any = failures._service
    for number in range(5):
        assert bool(service.vitals.problems) is (number >= 3)
        failures.count_failed("a", DataError("unknown model 'm'"), 20)
    (problem,) = service.vitals.problems.values()
    assert problem.startswith("environment e: 5 groups in a row failed, the last one: unknown model 'm'")
    failures.count_made(0)
    assert not service.vitals.problems


def test_groups_that_fail_in_a_row_end_the_environment_with_the_reason(failures: GroupFailures) -> None:
    failures.count_failed("a", EnvironmentCodeError("E.reward: no\nnumber"), 2)
    with pytest.raises(EnvironmentCodeError, match="environment e: 2 groups in a row failed, and none was made before"):
        failures.count_failed("b", EnvironmentCodeError("E.reward: no\nnumber"), 2)


def test_a_prompt_beyond_the_context_is_named_once_and_counted(
    failures: GroupFailures, caplog: pytest.LogCaptureFixture
) -> None:
    service: Any = failures._service
    for index in (3, 4, 3):
        failures.count_too_long(index, f"t{index}", PromptTooLongError("the prompt has 300 tokens"))
    assert sorted(failures.too_long) == [3, 4]
    assert len(caplog.records) == 1
    (problem,) = service.vitals.report().problems
    assert "2 of 10 tasks" in problem
    assert "'t3' (task 3): the prompt has 300 tokens" in problem
    assert service.vitals.metrics["environment/e/too_long"] == 2
    failures.refuse_all_too_long(3)
    with pytest.raises(EnvironmentCodeError, match="none of its 2 tasks leaves room"):
        failures.refuse_all_too_long(2)


class Sized(Environment):
    def __len__(self) -> int:
        return 6

    def task(self, index: int) -> Task:
        return Task(item=str(index), prompt="x" * (100 if index % 2 else 5))

    def reward(self, task: Task, session: Session) -> float:
        return 1.0


async def test_held_out_prompts_beyond_the_context_cost_their_own_samples_alone() -> None:
    config = CollectConfig(max_context=60)
    result = await evaluate(Sized(), FakeInference(lambda *_: "y"), k=2, config=config)
    assert (result.avg_at_k, result.too_long, result.unjudged) == (1.0, [1, 3, 5], 9)
    with pytest.raises(PromptTooLongError):
        await evaluate(Sized(), FakeInference(lambda *_: "y"), items=[1, 3], config=config)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("no such column"), "KeyError: 'no such column'"),
        (RecursionError("maximum recursion depth exceeded"), "RecursionError: maximum recursion depth exceeded"),
        (MemoryError(), "MemoryError"),
        (EnvironmentCodeError("its code ends the process: SystemExit(8)"), "its code ends the process: SystemExit(8)"),
    ],
    ids=lambda one: type(one).__name__,
)
async def test_what_a_task_raises_is_named_by_its_type_even_where_it_has_no_words(error: Exception, said: str) -> None:
    class Broken(Environment):
        def __len__(self) -> int:
            return 1

        def task(self, index: int) -> Task:
            raise error

    with pytest.raises(EnvironmentCodeError) as caught:
        await evaluate(Broken(), FakeInference(lambda *_: "y"), k=2)
    assert said in str(caught.value)
    assert describe_error(error).startswith(said)
