"""Trainer and real vLLM on one copy of the weights: what it computes with, and what it refuses.

This process is the trainer. A forward pass of transformers, on the same memory, says what is right.
"""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from contract.inference_servers import PYTHON, TOKEN, vllm
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.policy import PolicyModel, save_policy
from lachesis.pipeline.model.shared_memory import WeightSegment, segment_pointer
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.model.tokenizer import build_character_tokenizer, tokenizer_hash
from lachesis.schemas.errors import DataError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed; `make vllm` installs it and runs this"),
]

TOLERANCE = 1e-4
"""Nats between two float32 implementations."""
LENGTH = 512


def qwen2(seed, **changes):
    """Tied embeddings, biases, a base frequency of 500000."""
    default = {"rope_type": "default", "rope_theta": 5e5}
    return _sharp(Qwen2Config, Qwen2ForCausalLM, seed, tie=True, rope=default, **changes)


def qwen3(seed, **changes):
    """Queries and keys normalized in each head, heads wider than their share of the hidden size, tied embeddings."""
    default = {"rope_type": "default", "rope_theta": 1e6}
    return _sharp(Qwen3Config, Qwen3ForCausalLM, seed, tie=True, rope=default, head_dim=64, **changes)


def llama(seed, **changes):
    """An output head of its own, rotary frequencies scaled as Llama 3 does."""
    scaled = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    return _sharp(LlamaConfig, LlamaForCausalLM, seed, tie=False, rope=scaled, **changes)


def _sharp(kind, model_kind, seed, *, tie, rope, **changes):
    """Return a random policy whose distributions are far from uniform, so that wrong weights cost whole nats."""
    tokenizer = build_character_tokenizer(max_length=LENGTH)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = kind(
        **shape | {"num_key_value_heads": 2, "rope_parameters": rope} | changes,
        vocab_size=len(tokenizer), max_position_embeddings=LENGTH, tie_word_embeddings=tie, initializer_range=0.15,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_kind(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.5)
    return PolicyModel(model.eval(), tokenizer, tokenizer_hash(tokenizer))


class World:
    """One server, and trainers that come and go."""

    def __init__(self, url, folder, make):
        self.url = url
        self.weights = folder / "weights"
        self.make = make
        self.step = 0

    def client(self):
        return InferenceClient(ClientConfig(url=self.url, timeout=600, connect_timeout=60), token=TOKEN)

    @contextmanager
    def trainer(self, policy=None):
        policy = policy or self.make(0)
        segment = WeightSegment.share(policy.model)
        segment.announce(self.weights)
        try:
            yield policy, segment
        finally:
            segment.close(self.weights)

    def name(self, policy, segment):
        """Publish the weights as they are and return their version."""
        self.step += 1
        version = policy_version(self.step, "a", policy_tensors(policy.model))
        segment.publish(version)
        return str(version)

    async def serve(self, client, version):
        await client.update_weights(str(segment_pointer(self.weights)), version)

    async def agree(self, client, policy):
        """Compare a sequence longer than 256 tokens with transformers."""
        tokens = np.random.default_rng(self.step).integers(5, 100, 400).tolist()
        values, right = await client.prompt_logprobs(tokens), logprobs(policy, tokens)
        print(f"{self.make.__name__}: at most {np.abs(values - right)[1:].max():.1e} nats apart in 400 tokens")
        assert values[1:] == pytest.approx(right[1:], abs=TOLERANCE)


def names_in_dev_shm():
    """Segments of this project have no names: what would stay behind is what somebody has named."""
    return {path.name for path in Path("/dev/shm").iterdir() if "lachesis" in path.name}  # noqa: S108


def logprobs(policy, tokens):
    with torch.no_grad():
        return token_logprobs(policy.model, torch.tensor([tokens]), 1.0)[0][0].numpy()


def move_all(policy, *, seed=1, scale=0.02):
    """Move every weight, as an optimizer step does: in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)


@pytest.fixture(scope="module", params=[qwen2, llama])
def world(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_policy(request.param(0), folder / "model")
    with vllm(request.param(0), folder / "model", folder) as url:
        yield World(url, folder, request.param)


@pytest.mark.parametrize("world", [qwen2, llama, qwen3], indirect=True)
async def test_one_copy_every_weight_of_both_and_long_sequences_agree(world):
    """Parity beyond 256 tokens (rotary embedding, ties, biases), before and after steps that move every weight."""
    async with world.client() as client:
        with world.trainer(world.make(3)) as (policy, segment):
            await world.serve(client, world.name(policy, segment))
            await world.agree(client, policy)
            for seed in range(2):
                await client.pause("keep")
                with segment.changing():
                    move_all(policy, seed=seed)
                await world.serve(client, world.name(policy, segment))
                await world.agree(client, policy)


async def test_float32_masters_take_small_steps_that_vllm_sees(world):
    """bfloat16 weights would stay where they are at this rate: here nearly all of them move."""
    async with world.client() as client:
        with world.trainer() as (policy, segment):
            await world.serve(client, world.name(policy, segment))
            before = {name: tensor.clone() for name, tensor in policy_tensors(policy.model).items()}
            optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-6, weight_decay=0.0)
            await client.pause("keep")
            for step in range(20):
                tokens = torch.randint(5, 100, (4, 64), generator=torch.Generator().manual_seed(step))
                token_logprobs(policy.model, tokens, 1.0)[0].mean().backward()
                with segment.changing():
                    optimizer.step()
                optimizer.zero_grad()
            after = policy_tensors(policy.model)
            moved = sum(int((after[name] != before[name]).sum()) for name in before)
            rounded = sum(int((after[name].bfloat16() != before[name].bfloat16()).sum()) for name in before)
            total = sum(tensor.numel() for tensor in before.values())
            assert moved > 0.9 * total > 10 * rounded
            await world.serve(client, world.name(policy, segment))
            await world.agree(client, policy)


async def test_new_weights_in_mid_generation_tear_no_token(world):
    """Pause and reset of the cache: each token is of the weights that its span names, over everything before it."""
    params, samples = SamplingParams(max_tokens=300, ignore_eos=True), []

    async def generate():
        samples.extend(await client.generate(prompt, 8, params))

    async with world.client() as client:
        prompt = await client.tokenize([{"role": "user", "content": "hi there"}])
        with world.trainer() as (policy, segment):
            old = world.make(0)
            before = world.name(policy, segment)
            await world.serve(client, before)
            for attempt in range(20):  # until the step meets a generation
                samples.clear()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(generate)
                    await anyio.sleep(0.1 * (attempt + 1))
                    await client.pause("keep")
                    with segment.changing():
                        move_all(policy, seed=attempt)
                    after = world.name(policy, segment)
                    await world.serve(client, after)
                if max(len(sample.weight_versions) for sample in samples) >= 2:
                    break
                before = after
                old.model.load_state_dict(policy.model.state_dict())
            assert max(len(sample.weight_versions) for sample in samples) >= 2
            by_version = {before: old, after: policy}
            for sample in samples:
                tokens = [*prompt, *sample.token_ids.tolist()]
                for span in sample.weight_versions:
                    right = logprobs(by_version[span.version], tokens)[len(prompt) :][span.start : span.end]
                    assert sample.logprobs[span.start : span.end] == pytest.approx(right, abs=TOLERANCE)


async def test_what_does_not_fit_is_refused_by_name_and_the_weights_before_go_on(world):
    """Dtype, shape, coverage (also within lists of modules), rotary embedding, content."""
    other_rope = world.make(0)
    other_rope.model.config.rope_parameters = {**other_rope.model.config.rope_parameters, "rope_theta": 10000.0}
    cases = {
        r"model\.layers\.1\.\S+, model\.layers\.1": world.make(0, num_hidden_layers=1),
        r"gate_proj\.weight is float32\[384, 128\], expected float32\[256, 128\]": world.make(0, intermediate_size=384),
        "'rope_theta': 10000.0.*'rope_theta': 500000.0": other_rope,
    }
    async with world.client() as client:
        with world.trainer() as (policy, good):
            served = world.name(policy, good)
            await world.serve(client, served)
            for reason, wrong in cases.items():
                with world.trainer(wrong) as (_, segment), pytest.raises(DataError, match=reason):
                    await world.serve(client, world.name(wrong, segment))
            with world.trainer(world.make(0)) as (wrong, segment):
                _overwrite(segment, b'"dtype":"float32"', b'"dtype":"float16"')
                with pytest.raises(DataError, match=r"of another dtype: \S+\.weight is float16"):
                    await world.serve(client, world.name(wrong, segment))
            with world.trainer(world.make(0)) as (wrong, segment):
                version = world.name(wrong, segment)
                move_all(wrong)  # after the digest was taken
                with pytest.raises(DataError, match="does not have the digest"):
                    await world.serve(client, version)
            assert await client.weight_version() == served
            await world.agree(client, policy)


def _overwrite(segment, old, new):
    memory = segment._memory
    at = memory.find(old)
    assert at > 0
    memory[at : at + len(old)] = new


TRAINER = """
import sys
from pathlib import Path
from lachesis.pipeline.model.policy import load_model
from lachesis.pipeline.model.shared_memory import WeightSegment
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
policy = load_model(sys.argv[1])
segment = WeightSegment.share(policy.model)
segment.announce(Path(sys.argv[2]))
version = policy_version(0, "killed", policy_tensors(policy.model))
segment.publish(version)
print(version, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def mortal(world):
    """A trainer in a process of its own, and the version that it has published."""
    command = [sys.executable, "-c", TRAINER, world.weights.parent / "model", world.weights]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


async def test_a_segment_of_a_trainer_that_was_killed_is_refused_and_gone_and_the_next_one_is_taken(world, mortal):
    """The generation is compared with every update; kill -9 leaves no file and no memory behind."""
    process, version = mortal
    segments = names_in_dev_shm()
    pointer = segment_pointer(world.weights)
    async with world.client() as client:
        await world.serve(client, version)
        named = json.loads(pointer.read_text())
        assert named["path"].startswith(f"/proc/{process.pid}/")
        process.kill()  # SIGKILL: nothing of it can clean up
        process.wait()
        await world.serve(client, version)  # what the server is attached to is whole, and freed when it lets go
        pointer.write_text(json.dumps(named | {"generation": "0" * 32}))
        with pytest.raises(DataError, match="the trainer that made it has ended"):
            await world.serve(client, version)
        with world.trainer() as (policy, segment):
            await world.serve(client, world.name(policy, segment))
            await world.agree(client, policy)
    assert names_in_dev_shm() <= segments


async def test_weights_that_change_without_a_pause_end_the_server_instead_of_being_served(world):
    """The last test of a server."""
    async with world.client() as client:
        prompt = await client.tokenize([{"role": "user", "content": "hi there"}])
        with world.trainer() as (policy, segment):
            await world.serve(client, world.name(policy, segment))
            with segment.changing():
                move_all(policy)
            with pytest.raises((InfrastructureError, DataError)):
                await client.generate(prompt, 1, SamplingParams(max_tokens=5))
            with anyio.fail_after(600):
                while await client.ready():  # noqa: ASYNC110
                    await anyio.sleep(0.1)
