"""What a run's configuration refuses because nothing could ever come of it."""

import msgspec
import pytest

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig, TeacherConfig, TrainingConfig
from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.schemas.errors import ConfigError


def test_groups_larger_than_a_batch_are_refused_where_they_are_configured() -> None:
    batching = BatchingConfig(batch_size=8)
    RunConfig(batching=batching, environments={"sums": EnvironmentConfig(kind="k", samples=8)})
    RunConfig(batching=batching, evaluation={"sums": EnvironmentConfig(kind="k", samples=9)})  # never batched
    with pytest.raises(ConfigError, match=r"environments\.sums\.samples is 9, but a batch has 8"):
        RunConfig(batching=batching, environments={"sums": EnvironmentConfig(kind="k", samples=9)})


def test_more_new_tokens_than_room_is_reserved_for_are_refused_where_they_are_configured() -> None:
    RunConfig(evaluation={"sums": EnvironmentConfig(kind="k", max_new_tokens=2048)})  # never leased
    with pytest.raises(ConfigError, match=r"max_new_tokens is 2048.*longest_tokens = 1024"):
        RunConfig(environments={"sums": EnvironmentConfig(kind="k", max_new_tokens=2048)})


def test_a_teacher_to_learn_from_that_no_batch_would_bring_is_refused() -> None:
    learning = TrainingConfig(learner=LearnerConfig(loss=LossConfig(teacher_coef=0.5)))
    with pytest.raises(ConfigError, match=r'teacher_coef is 0\.5, but batching.teacher is "off"'):
        RunConfig(training=learning)
    RunConfig(training=learning, teacher=TeacherConfig(enabled=True), batching=BatchingConfig(teacher="optional"))


def test_shared_memory_is_refused_where_no_server_could_compute_with_the_trainers_own_weights() -> None:
    shared, served = WeightsConfig(transport="shared_memory"), {"policy": InferenceConfig(kind="vllm")}
    RunConfig(weights=shared, inference=served)
    RunConfig(weights=shared)
    with pytest.raises(ConfigError, match=r"leave inference\.policy\.url out"):
        RunConfig(weights=shared, inference={"policy": InferenceConfig(kind="vllm", url="http://gpu:8000")})
    with pytest.raises(ConfigError, match=r"leave training\.lora out"):
        RunConfig(weights=shared, inference=served, training=TrainingConfig(lora=LoraConfig()))


@pytest.mark.extension
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"samples": 1}, r"environments\.e\.samples is 1: advantages compare the samples of a group"),
        ({"lost_samples": "drop", "fewest_samples": 1}, r"environments\.e\.fewest_samples is 1"),
    ],
)
def test_a_group_of_one_is_refused_since_it_could_never_be_trained_on(changes, text):
    with pytest.raises(ConfigError, match=text):
        RunConfig(environments={"e": EnvironmentConfig(kind="x", **changes)})
    assert RunConfig(environments={"e": EnvironmentConfig(kind="gateway", **changes)})


@pytest.mark.extension
@pytest.mark.parametrize("kind", ["gateway", "atropos"])
def test_parameters_of_a_template_that_others_render_are_refused(kind: str) -> None:
    settings = EnvironmentConfig(kind=kind, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ConfigError, match=rf"environments\.e\.chat_template_kwargs is set, but its kind is {kind}"):
        RunConfig(environments={"e": settings})


def test_a_role_has_the_run_s_chat_template_unless_its_model_is_its_own() -> None:
    config = msgspec.convert(
        {
            "chat_template": "{{ 1 }}",
            "inference": {"teacher": {"model": "m"}, "eval": {"model": "m", "chat_template": "{{ 2 }}"}},
        },
        RunConfig,
    )
    found = {role: config.chat_template_of(role) for role in ("policy", "teacher", "eval")}
    assert found == {"policy": "{{ 1 }}", "teacher": None, "eval": "{{ 2 }}"}
