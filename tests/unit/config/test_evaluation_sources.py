"""What a run evaluates by default, and why some do not."""

import re

import msgspec
import numpy as np
import pytest

from lachesis.pipeline.config.evaluation_sources import (
    evaluable_steps,
    evaluated_environments,
    held_out_tasks,
    is_held_out,
    reason_not_evaluated,
)
from lachesis.pipeline.config.run import (
    EnvironmentConfig,
    EvaluationConfig,
    InferenceConfig,
    RunConfig,
    TrainingConfig,
    WeightsConfig,
)
from lachesis.services.planned_processes import planned_processes

KEYS = np.arange(500, dtype=np.uint64)
OWN, FOREIGN = EnvironmentConfig(kind="sums.py:Sums"), EnvironmentConfig(kind="gateway")
RUN = RunConfig(environments={"sums": OWN, "shop": FOREIGN})


def processes(config):
    return {row.name for row in planned_processes(config)}


@pytest.mark.extension
def test_by_default_the_runs_own_environments_are_evaluated_on_tasks_held_out_of_training():
    assert evaluated_environments(RUN) == {"sums": OWN}
    assert reason_not_evaluated(RUN) is None
    assert len(held_out_tasks(RUN, "sums", KEYS).tasks) == 50
    assert len(held_out_tasks(RUN, "shop", KEYS).tasks) == 0
    assert {"evaluator", "inference-eval"} <= processes(RUN)


def test_a_run_with_an_evaluation_of_its_own_holds_nothing_out():
    config = msgspec.structs.replace(RUN, evaluation={"sums": EnvironmentConfig(kind="other")})
    assert evaluated_environments(config) == config.evaluation
    assert not is_held_out(config, "sums")
    assert len(held_out_tasks(config, "sums", KEYS).tasks) == 0
    assert {"evaluator", "inference-eval"} <= processes(config)


@pytest.mark.extension
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"evaluate": EvaluationConfig(held_out=0.0)}, r"evaluate.held_out is 0; .* \[evaluation.NAME\]"),
        ({"mode": "observe"}, r"mode is observe.* \[evaluation.NAME\]"),
        ({"inference": {"policy": InferenceConfig(kind="vllm")}}, r"vLLM .* \[inference.eval\]"),
        ({"inference": {"policy": InferenceConfig(url="http://h:1")}}, r"existing server.* \[inference.eval\]"),
        ({"environments": {"shop": FOREIGN}}, r"clients elsewhere.* \[evaluation.NAME\]"),
    ],
)
def test_what_cannot_be_evaluated_by_default_says_why_and_how_to_get_it(changes, reason):
    config = msgspec.structs.replace(RUN, **changes)
    assert evaluated_environments(config) == {}
    assert re.search(reason, reason_not_evaluated(config))
    assert len(held_out_tasks(config, "sums", KEYS).tasks) == 0
    assert not {"evaluator", "inference-eval"} & processes(config)


@pytest.mark.extension
def test_a_policy_server_elsewhere_with_one_for_evaluation_is_evaluated():
    servers = {"policy": InferenceConfig(kind="vllm"), "eval": InferenceConfig(url="http://h:2")}
    config = msgspec.structs.replace(RUN, inference=servers)
    assert set(evaluated_environments(config)) == {"sums"}
    assert processes(config) >= {"evaluator"}
    assert "inference-eval" not in processes(config)


def test_a_run_without_environments_has_nothing_to_evaluate():
    assert "no environment's tasks" in reason_not_evaluated(RunConfig())
    assert evaluated_environments(RunConfig()) == {}


@pytest.mark.parametrize(
    ("transport", "changes", "steps"),
    [
        ("files", {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("shared_memory", {}, [0, 3, 6, 7]),  # the multiples of every_steps, and the last
        ("shared_memory", {"evaluate": EvaluationConfig(held_out=0)}, []),
    ],
)
def test_shared_weights_are_evaluable_at_the_steps_that_are_due(transport, changes, steps):
    run = {
        "weights": WeightsConfig(transport=transport),
        "training": TrainingConfig(steps=7),
        "evaluate": EvaluationConfig(every_steps=3),
        **changes,
    }
    found = evaluable_steps(msgspec.structs.replace(RUN, **run))
    assert [step for step in range(8) if step in found] == steps
