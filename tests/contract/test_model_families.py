"""Every family of models gets right tokens from the reference engine, beside plain passes and `generate`."""

import pytest
import torch
from contract.model_families import FAMILIES, family_model

from lachesis.pipeline.inference.config import EngineConfig
from lachesis.pipeline.inference.engines.reference.decoding import PaddedBatch, UnpaddedBatch
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.engines.reference.prompt_scoring import PromptScorer
from lachesis.pipeline.inference.prompt_tree import prompt_tree
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.context import positions_change_at
from lachesis.pipeline.model.tensors import policy_tensors

WAIT = 60
PROMPTS = [
    [3, 5, 6],
    [3, *range(7, 20)],
    [3, 20],
    [3, *range(30, 60)],
    [3, *range(25, 86)],  # 62 tokens: what is sampled crosses the chunks of 64 of linear attention
    [3, *range(20, 87)],
]
TOLERANCE = 5e-4
SLOW = {"minimax", "nemotron_h", "phi3", "recurrent_gemma", "xlstm", "zamba2"}
"""Families that are not decoded all rows together: they have caches of their own, or none that agrees with a pass."""
BY_PREFIX = {"phi3"}
"""The logits of a token depend on how long the pass is that computes them."""

COSTLY = {
    "bamba", "ernie4_5_moe", "falcon_h1", "falcon_mamba", "gemma3n", "gemma4", "glm4_moe", "granite_hybrid",
    "kimi_linear", "mamba2", "olmo3", "olmo_hybrid", "qwen3_next", "recurrent_gemma", "smollm3", "xlstm", "zamba2",
}  # fmt: skip
"""Each is like another family here, and takes long."""

pytestmark = [
    pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in COSTLY)) for name in FAMILIES]
    ),
    pytest.mark.filterwarnings("ignore"),  # transformers' own, of configurations as small as these
]


def start(model):
    return Engine(model, eos_token_id=2, weight_version="first", config=EngineConfig(max_model_len=90))


def logprobs_alone(model, name, prompt, tokens):
    """Logprobs of `tokens` after `prompt` by a plain pass; by one for each token where its length matters."""
    whole = [*prompt, *tokens]
    with torch.no_grad():
        if name not in BY_PREFIX:
            logits = model(torch.tensor([whole]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        else:
            ends = range(len(prompt), len(whole))
            logits = torch.stack([model(torch.tensor([whole[:end]]), use_cache=False).logits[0, -1] for end in ends])
    return logits.float().log_softmax(-1)[torch.arange(len(tokens)), tokens].tolist()


@pytest.mark.slow
def test_samples_and_prompts_of_a_mixed_batch_have_the_logprobs_of_plain_passes(name):
    model = family_model(name)
    with start(model) as engine:
        assert isinstance(engine._batch, PaddedBatch | UnpaddedBatch) == (name not in SLOW)
        engine.pause("keep").result(WAIT)
        requests = [(PROMPTS[0], 2, 4), (PROMPTS[1], 1, 20), (PROMPTS[2], 3, 12)]
        futures = [(prompt, submit(engine, prompt, n, tokens)) for prompt, n, tokens in requests]
        engine.resume().result(WAIT)
        futures[0][1].result(WAIT)  # two rows have left; these join the rest, or a batch of their own
        futures += [(prompt, submit(engine, prompt, 2, 9)) for prompt in PROMPTS[2:]]
        results = [(prompt, future.result(WAIT)) for prompt, future in futures]
    for prompt, result in results:
        scores = [
            entry[str(token)].logprob for token, entry in zip(prompt[1:], result.prompt_logprobs[1:], strict=True)
        ]
        assert scores == pytest.approx(prompt_scores(model, prompt), abs=TOLERANCE)
        for sample in result.samples:
            right = logprobs_alone(model, name, prompt, sample.token_ids)
            assert sample.logprobs == pytest.approx(right, abs=TOLERANCE)
        assert len({tuple(sample.token_ids) for sample in result.samples}) == len(result.samples)


def prompt_scores(model, prompt):
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt]), use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs[torch.arange(len(prompt) - 1), prompt[1:]].tolist()


def submit(engine, prompt, n, tokens):
    return engine.submit(prompt, SamplingParams(n=n, max_tokens=tokens, ignore_eos=True, seed=n, prompt_logprobs=0))


@pytest.mark.slow
def test_prompts_that_begin_alike_have_the_logprobs_of_plain_passes(name):
    model = family_model(name)
    prompt = PROMPTS[3]
    paths = prompt_tree([tuple(prompt), (*prompt[:9], 7, 8, 9), (*prompt[:9], 7, 11), (*prompt[:4], 5), (*PROMPTS[0],)])
    with torch.inference_mode():
        apart = positions_change_at(model.config, 90) is not None
        found = PromptScorer(model, max_tokens=8192, apart=apart).score(paths, [0] * len(paths))
    for path, (scores, _) in zip(paths, found, strict=True):
        values = [entry[str(token)].logprob for token, entry in zip(path.own, scores, strict=True) if entry]
        expected = prompt_scores(model, list(path.tokens))
        assert values == pytest.approx(expected[max(0, path.shared - 1) :], abs=TOLERANCE)


@pytest.mark.slow
def test_greedy_tokens_of_a_mixed_batch_are_those_that_generate_takes(name):
    model = family_model(name)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with start(model) as engine:
        futures = [engine.submit(prompt, params) for prompt in PROMPTS]
        found = [future.result(WAIT).samples[0].token_ids for future in futures]
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            model.generation_config.eos_token_id = None
            whole = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=20,
                pad_token_id=0,
                use_cache=name not in SLOW,
            )
        assert tokens == whole[0, len(prompt) :].tolist()


def test_new_weights_in_mid_generation_reach_every_kind_of_cache(name):
    model, other = family_model(name), family_model(name, seed=1)
    old = {key: tensor.clone() for key, tensor in policy_tensors(model).items()}
    new = dict(policy_tensors(other))
    sampled = 0
    changing = []

    def change(_):
        nonlocal sampled
        sampled += 1
        if sampled == 10:  # in the engine's thread, so the exchange comes right after this token
            changing.append(engine.load_weights(new, "second"))

    with start(model) as engine:
        params = SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=3)
        result = engine.submit(PROMPTS[1], params, change).result(WAIT)
        changing[0].result(WAIT)
    for sample in result.samples:
        assert [(span.version, span.start, span.end) for span in sample.weight_versions] == [
            ("first", 0, 5), ("second", 5, 20)
        ]  # fmt: skip
        for span in sample.weight_versions:
            model.load_state_dict(old if span.version == "first" else new, strict=False)
            right = logprobs_alone(model, name, PROMPTS[1], sample.token_ids)[span.start : span.end]
            assert sample.logprobs[span.start : span.end] == pytest.approx(right, abs=TOLERANCE)
