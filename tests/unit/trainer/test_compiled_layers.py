"""Layers compiled one by one: the step of plain layers within rounding, and a way back."""

import logging
import shutil

import msgspec
import pytest
import torch
from torch._dynamo.callback import callback_handler

from lachesis.pipeline.config.run import TrainingConfig
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer import compile_watch, layers
from lachesis.pipeline.trainer.compile_watch import CompileWatch
from lachesis.pipeline.trainer.config import LearnerConfig, ModelInputConfig
from lachesis.pipeline.trainer.layers import compile_layers
from lachesis.pipeline.trainer.learner import Learner
from lachesis.schemas.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
SETTINGS = {"warmup_steps": 0, "learning_rate": 1e-3, "max_tokens_per_microbatch": 40}


def taken(small_policy, batch, **settings):
    """Metrics of three steps, and the learner."""
    learner = Learner(small_policy().model, LearnerConfig(**SETTINGS | settings))
    return [learner.step(batch(small_policy(), seed)) for seed in range(3)], learner


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_steps_are_those_of_plain_layers_within_rounding(small_policy, batch):
    torch._dynamo.reset()
    compiled, learner = taken(small_policy, batch, compile=True, recompute_layers=True)
    assert learner._compiling.pieces, "nothing was compiled"
    plain, reference = taken(small_policy, batch, recompute_layers=True)
    for one, other in zip(compiled, plain, strict=True):
        for name in ("loss", "grad_norm", "entropy", "step_kl"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-3, abs=1e-6), name
    expected = policy_tensors(reference.model)
    for name, tensor in policy_tensors(learner.model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5, msg=name)
    repeated, twin = taken(small_policy, batch, compile=True, recompute_layers=True)
    assert weights_digest(policy_tensors(twin.model)) == weights_digest(policy_tensors(learner.model))
    assert [msgspec.structs.replace(one, seconds=0.0) for one in repeated] == [
        msgspec.structs.replace(one, seconds=0.0) for one in compiled
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(("packing", "forms"), [("auto", 1), (False, 2)])
def test_layers_are_compiled_for_a_few_forms_and_not_for_each_size(small_policy, batch, caplog, packing, forms):
    torch._dynamo.reset()
    learner = Learner(small_policy().model, LearnerConfig(**SETTINGS | {"packing": packing, "compile": True}))
    pieces = []
    with caplog.at_level(logging.INFO, "lachesis"):
        for seed, rows in enumerate([6, 1, 9, 2, 3, 12, 1, 4]):
            learner.step(batch(small_policy(), seed, rows=rows))
            pieces.append(learner._compiling.pieces)
    assert pieces[-1] == pieces[2], "rows and lengths make no further ones"
    said = [record.getMessage() for record in caplog.records if "torch" in record.getMessage()]
    assert "torch compiles the model's layers, which may take minutes: piece 1" in said
    assert sum("torch has compiled" in text for text in said) <= 2 * forms


def test_compiling_is_bounded(monkeypatch, caplog):
    stances = []
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)
    watch = CompileWatch(max_seconds=0.5)
    for seconds in (0.2, 0.2, 0.2, 0.2):
        watch.begin()
        monkeypatch.setattr(compile_watch.time, "monotonic", lambda: 100.0)
        callback_handler.run_start_callbacks(None)
        monkeypatch.setattr(compile_watch.time, "monotonic", lambda now=100 + seconds: now)
        callback_handler.run_end_callbacks(None)
        watch.end()
    assert watch.pieces == 4
    assert stances == ["eager_on_recompile"]
    assert caplog.text.count("runs as plain layers from now on") == 1
    callback_handler.run_start_callbacks(None)
    assert watch.pieces == 4, "it watches steps alone"


@pytest.mark.slow
def test_layers_are_as_before_once_the_setting_is(small_policy, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/g++")
    learner = Learner(small_policy().model, LearnerConfig(compile=True))
    found = layers.decoder_layers(learner.model)
    assert all(layer._compiled_call_impl is not None for layer in found)
    first = [layer._compiled_call_impl for layer in found]
    learner.configure(LearnerConfig(compile=True, learning_rate=1e-3))
    assert [layer._compiled_call_impl for layer in found] == first
    learner.configure(LearnerConfig())
    assert [layer._compiled_call_impl for layer in found] == [None, None]


def test_what_cannot_be_compiled_is_refused(small_policy, monkeypatch):
    with pytest.raises(ConfigError, match=r"learner\.compile: Linear has no layers"):
        compile_layers(torch.nn.Linear(2, 2), on=True, device="cpu")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match=r"a C\+\+ compiler"):
        Learner(small_policy().model, LearnerConfig(compile=True))
    with pytest.raises(ConfigError, match=r"does not go with training\.inputs"):
        TrainingConfig(learner=LearnerConfig(compile=True), inputs=[ModelInputConfig(input="images")])
