"""What `lachesis doctor` says of models: each is loaded, and sampled from once."""

from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from unit.cli.test_load_check import found, here

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy

__all__ = ["here"]  # the fixture

pytestmark = pytest.mark.outside


def test_models_are_sampled_from_once_each_and_what_fails_is_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=64)
    save_policy(policy, here / "good")
    settings = {"model": "good", "environments": {"shop": {"kind": "shop.py:Shop", "params": {"path": "p"}}}}
    good = msgspec.convert(settings, run_config_type())
    text = found(good, models=True)["inference.policy"]
    assert text.state == "ok"
    assert "samples a token" in text.text
    assert "context of 64; ends at <|eos|>" in text.text

    def fails(*_: object, **__: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", fails)
    text = found(good, models=True)["inference.policy"]
    assert (text.state, "list index out of range" in text.text) == ("failed", True)
    assert "inference.policy" not in found(good), "up does not wait for a model"


def test_a_model_whose_check_failed_is_not_sampled_from(here: Path) -> None:
    save_policy(build_tiny_policy(0, width=16, layers=1, heads=2, max_length=64), here / "good")
    save_policy(build_tiny_policy(0, width=16, layers=1, heads=2, max_length=64), here / "broken")
    tensors = load_file(here / "broken" / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if "q_proj" not in name}, here / "broken/model.safetensors")
    settings = {"environments": {"shop": {"kind": "shop.py:Shop", "params": {"path": "p"}}}, "model": "broken"}
    every = found(msgspec.convert(settings, run_config_type()), models=True)
    assert every["model"].state == "failed"
    assert "inference.policy" not in every
    (here / "broken" / "tokenizer.json").write_text("{")
    every = found(msgspec.convert(settings, run_config_type()), models=True, prompts=True)
    assert [name for name, one in every.items() if one.state == "failed"] == ["model"]
    own = {**settings, "inference": {"policy": {"model": "good"}}}
    every = found(msgspec.convert(own, run_config_type()), models=True)
    assert (every["model"].state, every["inference.policy"].state) == ("failed", "ok"), "it serves another model"


def test_a_step_that_takes_more_memory_than_there_is_is_doubtful(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_policy(build_tiny_policy(0, width=16, layers=1, heads=2, max_length=64), here / "good")
    settings = {"model": "good", "environments": {"shop": {"kind": "shop.py:Shop", "params": {"path": "p"}}}}
    config = msgspec.convert(settings, run_config_type())
    monkeypatch.setattr("lachesis.services.run.memory_plan.free_bytes", lambda device: 10**11)
    assert found(config, models=True)["model"].state == "ok"
    monkeypatch.setattr("lachesis.services.run.memory_plan.free_bytes", lambda device: 10**8)
    doubtful = found(config, models=True)["model"]
    assert (doubtful.state, "bytes; there are 100,000,000" in doubtful.text) == ("doubtful", True)
    assert "What helps" in doubtful.text
