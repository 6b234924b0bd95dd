"""`doctor` says on which device each model computes, and what would be faster."""

import msgspec
import pytest

from lachesis.pipeline.config.extended import run_config_type
from lachesis.schemas.errors import ConfigError
from lachesis.services.preflight.devices import describe_devices

TRAINED = {"mode": "train", "environments": {"a": {"kind": "spell_backward"}}, "model": "m"}


def config_of(**settings):
    return msgspec.convert(TRAINED | settings, run_config_type())


def test_without_a_gpu_all_is_on_the_cpu():
    text = describe_devices(config_of(), 0)
    assert "torch sees no GPU here" in text
    assert "training.device = 'auto': cpu" in text
    assert "inference.policy.device = 'auto': cpu" in text
    assert "vllm" not in text


def test_one_gpu_takes_trainer_and_server_and_says_what_is_faster():
    text = describe_devices(config_of(), 1)
    assert "training.device = 'auto': cuda:0" in text
    assert "inference.policy.device = 'auto': cuda:0" in text
    assert 'inference.policy.kind = "vllm" would sample' in text
    assert 'weights.transport = "shared_memory"' in text
    assert "without a file" not in describe_devices(config_of(weights={"transport": "shared_memory"}), 1)


@pytest.mark.parametrize(("gpus", "server"), [(2, "cuda:1"), (8, "cuda:7")])
def test_of_several_the_trainer_takes_the_first_and_servers_the_last(gpus, server):
    text = describe_devices(config_of(), gpus)
    assert "training.device = 'auto': cuda:0" in text
    assert f"inference.policy.device = 'auto': {server}" in text
    assert "share its memory" not in text


def test_what_is_set_is_said_as_it_is():
    text = describe_devices(config_of(training={"device": "cpu"}, inference={"policy": {"device": "cuda"}}), 1)
    assert "training.device = 'cpu': cpu" in text
    assert "inference.policy.device = 'cuda': cuda:0" in text
    assert "share its memory" not in text


@pytest.mark.parametrize(
    ("settings", "gpus", "said"),
    [
        ({"training": {"device": "cuda:3"}}, 0, "training.device is 'cuda:3', and torch sees no GPU here"),
        ({"training": {"device": "cuda"}}, 0, "training.device is 'cuda', and torch sees no GPU here"),
        ({"training": {"device": "cuda:2"}}, 2, "torch sees 2 GPUs here, counted from 0"),
        ({"inference": {"policy": {"device": "cuda:1"}}}, 1, "inference.policy.device is 'cuda:1'"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(settings, gpus, said):
    with pytest.raises(ConfigError, match=said):
        describe_devices(config_of(**settings), gpus)
