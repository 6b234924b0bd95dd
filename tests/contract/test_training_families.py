"""Every family of models is trained on what the reference engine samples: both compute the same logprobs."""

import numpy as np
import pytest
from contract.model_families import FAMILIES, family_model

from lachesis.pipeline.inference.config import EngineConfig
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.context import positions_change_at
from lachesis.pipeline.model.logprobs import SampledLogprobs
from lachesis.pipeline.model.tensors import policy_tensors
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence

WAIT = 60
TOLERANCE = 1e-3
PROMPTS = {3: 10, 9: 12, 20: 50, 63: 8, 70: 5}
"""Tokens of each prompt, and those sampled after it: short ones, and some on either side of a chunk of 64."""
QUICK = {"gemma3", "gpt_oss", "lfm2", "mamba2", "nemotron_h", "qwen3_5"}
"""One of each kind of layer; the others are slow."""

pytestmark = [
    pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES]
    ),
    pytest.mark.filterwarnings("ignore"),  # transformers' own, of configurations as small as these
]


def sampled(engine, seed):
    """Sequences with the engine's logprobs; half of the samples are good, half bad."""
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(3, 96, length).tolist() for length in PROMPTS]
    limit = min(90, engine.max_model_len)
    futures = [
        engine.submit(prompt, SamplingParams(n=2, max_tokens=tokens, ignore_eos=True, seed=seed))
        for prompt, tokens in zip(prompts, PROMPTS.values(), strict=True)
        if len(prompt) + tokens <= limit
    ]
    found = []
    for number, (prompt, future) in enumerate(zip(prompts, futures, strict=False)):
        for at, sample in enumerate(future.result(WAIT).samples):
            mask = np.repeat([False, True], [len(prompt), len(sample.token_ids)])
            logprobs = np.zeros(len(mask), np.float32)
            logprobs[mask] = sample.logprobs
            tokens = np.array([*prompt, *sample.token_ids], np.int32)
            found.append(
                TrainingSequence(
                    tokens=tokens, loss_mask=mask, logprobs=logprobs, advantage=[1.0, -0.7][at], group_id=f"g{number}"
                )
            )
    return pack(found)


def assert_agreed(batch, model):
    ours, _ = SampledLogprobs(model)(batch.tokens_BT, 1.0, batch.mask_BT)
    assert ours[batch.mask_BT].tolist() == pytest.approx(batch.logprobs_BT[batch.mask_BT].tolist(), abs=TOLERANCE)


def gradient(name, batch, max_tokens):
    """What the optimizer is given in a step whose passes have at most `max_tokens`."""
    trained = family_model(name)
    learner = Learner(trained, LearnerConfig(max_tokens_per_microbatch=max_tokens))
    found = {}

    def note(*_):
        found.update({name: one.grad.clone() for name, one in trained.named_parameters() if one.grad is not None})

    learner.optimizer.register_step_pre_hook(note)
    return learner.step(batch), found


@pytest.mark.slow
def test_an_optimizer_step_reaches_the_engine_and_padding_changes_no_gradient(name):
    served, trained = family_model(name), family_model(name)
    context = positions_change_at(served.config, 90) or 90  # beyond it a run is refused
    with Engine(served, eos_token_id=2, weight_version="first", config=EngineConfig(max_model_len=context)) as engine:
        before = sampled(engine, 0)
        assert_agreed(before, trained)
        together, padded = gradient(name, before, 10_000)
        apart, alone = gradient(name, before, 1)
        assert together.loss == pytest.approx(apart.loss, abs=1e-5)
        largest = max(one.abs().max().item() for one in alone.values())
        assert padded.keys() == alone.keys()
        for parameter, right in alone.items():
            assert (padded[parameter] - right).abs().max().item() < 1e-4 * largest, parameter

        learner = Learner(trained, LearnerConfig(learning_rate=3e-3))
        learner.step(before)
        new = {key: tensor.clone() for key, tensor in policy_tensors(trained).items()}
        engine.load_weights(new, "second").result(WAIT)
        after = sampled(engine, 1)
    assert_agreed(after, trained)
    moved, _ = SampledLogprobs(family_model(name))(after.tokens_BT, 1.0, after.mask_BT)
    assert (moved - after.logprobs_BT)[after.mask_BT].abs().max().item() > 10 * TOLERANCE
