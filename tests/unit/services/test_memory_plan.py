"""`lachesis plan`: what a step takes, beside what a device has, with an exit code and what helps."""

import json

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from lachesis.pipeline.batching.config import BatchingConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.training.memory_plan import StepShape
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.commands import app
from lachesis.services.run.memory_plan import plan_step, step_shape

GB = 10**9


@pytest.fixture
def model(tmp_path):
    """A folder with a model's configuration alone."""
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    return str(tmp_path / "model")


def planned(model, gb, **settings):
    return plan_step(RunConfig(model=model, **settings), model=None, device="cpu", memory=gb)


def test_it_exits_by_whether_the_step_fits(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    fits = CliRunner().invoke(app, ["plan", "--model", model, "--device", "cpu", "--memory", "64"])
    assert fits.exit_code == 0, fits.output
    assert "64,000,000,000: it fits" in fits.output
    assert "gradients" in fits.output
    not_json = CliRunner().invoke(app, ["plan", "--model", model, "--device", "cpu", "--memory", "0.55", "--json"])
    assert not_json.exit_code == 1
    found = json.loads(not_json.output)
    assert sum(found["parts"].values()) == found["total"] > found["available"] == 550_000_000
    assert f"{found['total'] - found['available']:,} are missing" in found["text"]
    assert any("max_tokens_per_microbatch = " in cure for cure in found["cures"])


def test_what_helps_does(model):
    found = planned(model, 0.6)
    assert not found.fits
    tokens = int(next(cure for cure in found.cures if "microbatch" in cure).split(" = ")[1].split(":")[0])
    settings = {"training": {"learner": {"max_tokens_per_microbatch": tokens}}}
    import msgspec

    config = msgspec.convert({"model": model, **settings}, RunConfig)
    assert plan_step(config, model=None, device="cpu", memory=0.6).fits


def test_nothing_helps_where_the_process_alone_is_larger(model):
    assert planned(model, 0.2).cures == [
        "nothing that a setting does makes it fit: take a smaller model, or a device with more memory"
    ]


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
