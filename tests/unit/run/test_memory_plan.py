"""`lachesis plan`: what a step takes, beside what a device has, with an exit code and what helps."""

import json

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.model.host_memory import HostCopies
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.model.tensors import policy_tensors
from lachesis.pipeline.trainer.checkpoint import CheckpointContent
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.memory_plan import MemoryPlan, StepShape
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.commands import app
from lachesis.services.run.memory_plan import copied_bytes, plan_step, step_shape

pytestmark = pytest.mark.outside

GB = 10**9


@pytest.fixture
def model(tmp_path):
    """A folder with a model's configuration alone."""
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    return str(tmp_path / "model")


FEW = ["--set", "batching.batch_size=4", "--set", "training.learner.max_tokens_per_microbatch=4096"]
SMALL = {"batching": {"batch_size": 4}}
"""A batch with few ways to divide it, each of which is planned where a step does not fit."""


def planned(model, gb, **training):
    config = msgspec.convert({"model": model, "training": training, **SMALL}, run_config_type())
    return plan_step(config, model=None, device="cpu", memory=gb)


@pytest.mark.slow
def test_it_exits_by_whether_the_step_fits(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    fits = CliRunner().invoke(app, ["plan", "--model", model, "--device", "cpu", "--memory", "64", *FEW])
    assert fits.exit_code == 0, fits.output
    assert "64,000,000,000: it fits" in fits.output
    assert "gradients" in fits.output
    not_json = CliRunner().invoke(
        app, ["plan", "--model", model, "--device", "cpu", "--memory", "0.55", "--json", *FEW]
    )
    assert not_json.exit_code == 1
    found = json.loads(not_json.output)
    assert sum(found["parts"].values()) == found["total"] > found["available"] == 550_000_000
    assert f"{found['total'] - found['available']:,} are missing" in found["text"]
    assert any("max_tokens_per_microbatch = " in cure for cure in found["cures"])


@pytest.mark.slow
def test_what_helps_does(model):
    found = planned(model, 0.55, learner={"max_tokens_per_microbatch": 4096})
    assert not found.fits
    tokens = int(next(cure for cure in found.cures if "microbatch" in cure).split(" = ")[1].split(":")[0])
    assert planned(model, 0.55, learner={"max_tokens_per_microbatch": tokens}).fits


@pytest.mark.slow
def test_nothing_helps_where_the_process_alone_is_larger(model):
    assert planned(model, 0.2).cures == [
        "nothing that a setting does makes it fit: take a smaller model, or a device with more memory"
    ]


def test_the_copies_are_those_that_a_trainer_makes(model):
    config = AutoConfig.from_pretrained(model)
    policy = PolicyModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, "")
    learner = Learner(policy.model, LearnerConfig())
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learner.optimizer.step()
    checkpoint = CheckpointContent.of(policy, learner, HostCopies()).nbytes
    weights = sum(tensor.nbytes for tensor in policy_tensors(policy.model).values())
    step = MemoryPlan(weights, 0, weights, 2 * weights, 0, 4 * weights)
    for transport, dtype, versions in (
        ("files", "float32", 1),
        ("nats", "bfloat16", 2),
        ("shared_memory", "float32", 0),
    ):
        sent = RunConfig(weights=WeightsConfig(transport=transport, dtype=dtype))
        assert copied_bytes(sent, step) == pytest.approx(versions * weights + checkpoint, abs=10_000)


@pytest.mark.slow
def test_copies_count_where_they_are(model):
    here = planned(model, 64)
    assert here.parts["copies"] == 2 * here.parts["weights"] + here.parts["moments"]
    assert sum(here.parts.values()) == here.total
    there = plan_step(RunConfig(model=model), model=None, device="cuda", memory=64)
    assert there.parts["copies"] == 0
    copies = f"main memory holds up to {here.parts['copies']:,} bytes of copies"
    assert any(copies in note for note in there.notes)


def test_the_micro_batch_is_of_the_longest_sequences():
    longer = {
        "a": EnvironmentConfig(kind="x", longest_tokens=300),
        "b": EnvironmentConfig(kind="x", longest_tokens=500),
    }
    config = RunConfig(environments=longer, batching=BatchingConfig(batch_size=40))
    assert step_shape(config, 4000) == StepShape(8, 500, 5)
    assert step_shape(config, 100) == StepShape(1, 500, 40)
    assert step_shape(config, 10**6) == StepShape(40, 500, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": None}, "no model is named"),
        ({"device": "cuda:63"}, "say the memory of yours with --memory"),
        ({"device": "tpu"}, "none of cpu, cuda"),
        ({"model": "no/such/folder/here"}, "could not be loaded"),
    ],
)
def test_what_cannot_be_planned_says_why(model, options, text):
    given = {"model": model, "device": "cpu", "memory": None} | options
    with pytest.raises(ConfigError, match=text):
        plan_step(RunConfig(), **given)
