"""Settings of a run that trains at Tinker: what is refused, what is started, what doctor looks for."""

import pytest

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.config.extended import run_config_type, training_config_type
from lachesis.pipeline.config.run import EnvironmentConfig, InferenceConfig
from lachesis.pipeline.extensions.tinker.config import TinkerConfig
from lachesis.pipeline.extensions.tinker.key import check_key
from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.preflight.machine import needed_extras
from lachesis.services.registry import service_of, services


def run(**changes):
    training = training_config_type()(backend="tinker", **changes.pop("training", {}))
    environments = {"words": EnvironmentConfig(kind="spell_backward")}
    batching = BatchingConfig(teacher="off")
    return run_config_type()(training=training, environments=environments, batching=batching, **changes)


def test_the_defaults_are_those_of_tinker():
    settings = TinkerConfig()
    assert (settings.learning_rate, settings.beta1, settings.beta2, settings.port) == (4e-5, 0.9, 0.95, 8001)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"training": {"learner": LearnerConfig(learning_rate=1e-3)}}, "training.learner"),
        ({"training": {"lora": LoraConfig()}}, "training.lora"),
        ({"training": {"ranks": 2}}, "training.ranks"),
        ({"inference": {"policy": InferenceConfig(url="http://127.0.0.1:1")}}, "inference.policy"),
    ],
)
def test_what_has_no_meaning_at_tinker_is_refused_by_name(changes, named):
    with pytest.raises(ConfigError, match=named):
        run(**changes)


def test_trainer_and_policy_run_at_tinker_and_a_teacher_does_not():
    config = run()
    stages = {part: service_of(config, "inference", part).stage for part in ("policy", "eval", "teacher")}
    assert stages["policy"] == stages["eval"] == "lachesis.pipeline.extensions.tinker.serving:run_tinker_inference"
    assert stages["teacher"] == services()["inference"].stage
    assert service_of(config, "trainer", "").extra == "tinker"
    assert needed_extras(config) == {"tinker"}


def test_doctor_looks_for_the_key_and_never_shows_it(monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    assert "TINKER_API_KEY holds no key" in str(list(check_key(run())))
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    assert "tml-secret" not in str(list(check_key(run())))
