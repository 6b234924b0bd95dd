"""The memory of a step, planned without any: its parts, what settings change of it, and what a real step takes."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config

from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.logit_memory import DeviceMemory
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig
from lachesis.pipeline.trainer.memory_plan import StepShape, plan_memory

CPU, CARD = DeviceMemory("cpu"), DeviceMemory("cuda", 80 << 30)
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
HOW = ("warn", "shorten", "refuse")
PARAMETERS = 4096 * 256 + 2 * (4 * 256 * 256 + 3 * 256 * 1024 + 2 * 256) + 256


def planned(memory=CPU, shape=StepShape(4, 128), learner=LearnerConfig(), **options):  # noqa: B008 - frozen
    return plan_memory(LlamaConfig(**SHAPE), learner, shape, memory, **options)


@pytest.fixture(scope="module")
def plain():
    return planned()


def test_weights_gradients_and_moments_are_those_of_the_parameters(plain):
    assert plain.weights == pytest.approx(4 * PARAMETERS, rel=1e-3)
    assert plain.gradients == 4 * PARAMETERS
    assert plain.moments == pytest.approx(8 * PARAMETERS, rel=1e-3)
    assert plain.peak == plain.weights + plain.gradients + plain.moments + plain.activations
    assert plain.reference == 0


@pytest.mark.slow
def test_activations_follow_the_micro_batch_the_precision_and_the_layers(plain):
    larger = planned(shape=StepShape(8, 128))
    assert larger.activations > 1.5 * plain.activations
    assert larger.weights == plain.weights
    assert planned(recompute=True).activations < 0.8 * plain.activations
    assert planned(CARD).activations < plain.activations, "bfloat16"
    single = planned(shape=StepShape(4, 128, 1))
    assert single.peak < plain.peak, "gradients come while activations go"


def test_a_reference_model_counts(plain):
    found = planned(learner=LearnerConfig(loss=LossConfig(kl_coef=0.1)))
    assert found.reference == plain.weights
    assert found.peak == plain.peak + plain.weights


@pytest.mark.slow
def test_copies_of_a_step_that_may_be_undone_count():
    little = {how: planned(shape=StepShape(1, 8), learner=LearnerConfig(on_large_step=how)) for how in HOW}
    assert little["shorten"].activations == pytest.approx(2 * 4 * PARAMETERS, rel=0.01), "before and after"
    assert little["refuse"].activations == pytest.approx(3 * 4 * PARAMETERS, rel=0.01), "weights and both moments"
    assert little["warn"].activations < 4 * PARAMETERS


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is an extra")
def test_adapters_have_the_gradients_and_moments_of_what_they_train(plain):
    found = planned(lora=LoraConfig())
    trained = 2 * 32 * (4 * 2 * 256 + 3 * (256 + 1024))
    assert found.gradients == 4 * trained
    assert found.moments == pytest.approx(8 * trained, rel=1e-3)
    assert found.weights == plain.weights + 4 * trained


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is an extra")
def test_adapters_are_merged_into_new_weights_after_the_step():
    found = planned(shape=StepShape(1, 8), lora=LoraConfig())
    linear = 4 * 2 * (4 * 256 * 256 + 3 * 256 * 1024)
    assert found.peak >= found.weights + found.moments + linear


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and has glibc give back what is freed")
@pytest.mark.parametrize(
    ("changes", "recompute", "microbatches"),
    [({}, 0, 2), ({}, 1, 1), ({"hidden_size": 512, "vocab_size": 32000}, 0, 1)],
    ids=["3 million", "3 million, computed again", "25 million"],
)
def test_a_step_takes_what_was_planned_within_a_tenth(changes, recompute, microbatches):
    shape = SHAPE | changes
    script = Path(__file__).with_name("rss_of_steps.py")
    arguments = ["4", "128", str(microbatches), str(recompute), json.dumps(shape)]
    given_back = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # so that resident memory is that of the tensors
    took = subprocess.run(
        [sys.executable, str(script), *arguments], env=os.environ | given_back, check=True, stdout=subprocess.PIPE
    ).stdout
    learner = LearnerConfig(max_step_kl=None)
    plan = plan_memory(LlamaConfig(**shape), learner, StepShape(4, 128, microbatches), CPU, recompute=bool(recompute))
    assert int(took) == pytest.approx(plan.peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "recompute", "took"), [(896, False, 37.0e9), (896, True, 11.5e9), (1536, True, 31.3e9)]
)
def test_peaks_recorded_on_an_h100_are_planned_within_a_tenth(width, recompute, took):
    """Qwen2.5's shapes, 16 rows of 1,024 tokens in a micro-batch, as the trainer was before it chose by device."""
    mlp, layers, heads = {896: (4864, 24, 14), 1536: (8960, 28, 12)}[width]
    config = Qwen2Config(
        vocab_size=151936, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, tie_word_embeddings=True,
        num_attention_heads=heads, num_key_value_heads=2,
    )  # fmt: skip
    plan = plan_memory(config, LearnerConfig(device_kernels=False), StepShape(16, 1024), CARD, recompute=recompute)
    assert plan.peak == pytest.approx(took, rel=0.1)
