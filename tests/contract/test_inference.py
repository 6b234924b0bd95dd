"""What every inference server owes a run, on the reference server and on real vLLM: one client, one set of tests.

Both hold the same model in float32, and a forward pass of transformers says what is right.
"""

import anyio
import httpx
import numpy as np
import pytest
import torch
from contract.inference_servers import TOKEN, reference, sharp_policy, vllm

from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.policy import save_policy
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.model.weight_files import write_weights
from lachesis.schemas.errors import DataError

pytestmark = pytest.mark.timeout(600)

TOLERANCE = 1e-4
"""Nats between two float32 implementations."""
HI = [{"role": "user", "content": "hi there"}]


class World:
    """One server, and the policies that are published to it."""

    def __init__(self, url, folder, policies):
        self.url = url
        self.weights = folder / "weights"
        self.policies = policies
        self.published = {}
        for step, policy in enumerate(policies):
            tensors = policy_tensors(policy.model)
            version = policy_version(step, "a", tensors)
            self.published[str(version)] = (write_weights(tensors, self.weights, version), policy)

    def client(self):
        return InferenceClient(ClientConfig(url=self.url), token=TOKEN)

    async def load(self, client, step):
        """Load the weights of `step` and return their version."""
        version, (path, _) = list(self.published.items())[step]
        await client.update_weights(str(path), version)
        return version

    def logprobs(self, version, tokens, temperature=1.0):
        """Float32 [T]: what transformers says of each token after the first, under the weights of `version`."""
        with torch.no_grad():
            values, _ = token_logprobs(self.published[version][1].model, torch.tensor([tokens]), temperature)
        return values[0].numpy()


@pytest.fixture(scope="module", params=[reference, pytest.param(vllm, marks=pytest.mark.slow)])
def world(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_policy(sharp_policy(0), folder / "model")
    with request.param(sharp_policy(0), folder / "model", folder) as url:
        yield World(url, folder, [sharp_policy(0), sharp_policy(1)])


async def test_it_says_what_it_is(world):
    async with world.client() as client:
        found = await client.probe()
    assert (found.model, found.max_model_len) == ("policy", 256)
    assert found.tokenizer_hash == world.policies[0].tokenizer_hash


async def test_messages_become_the_ids_that_transformers_makes_of_them(world):
    tokenizer = world.policies[0].tokenizer
    async with world.client() as client:
        tokens = await client.tokenize(HI)
        assert tokens == tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)
        assert await client.detokenize(tokens) == tokenizer.decode(tokens)


@pytest.mark.parametrize("step", [1, 0])
async def test_samples_have_the_logprobs_of_the_weights_that_were_published(world, step):
    async with world.client() as client:
        version = await world.load(client, step)
        assert await client.weight_version() == version
        prompt = await client.tokenize(HI)
        samples = await client.generate(prompt, 4, SamplingParams(max_tokens=40, temperature=0.7))
    assert len(samples) == 4
    for sample in samples:
        right = world.logprobs(version, [*prompt, *sample.token_ids.tolist()], temperature=0.7)[len(prompt) :]
        assert sample.logprobs == pytest.approx(right, abs=TOLERANCE)
        assert [(s.version, s.start, s.end) for s in sample.weight_versions] == [(version, 0, len(right))]
        assert sample.text == world.policies[0].tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        assert sample.finish_reason in {"stop", "length"}


async def test_prompt_logprobs_agree_over_a_long_sequence(world):
    tokens = np.random.default_rng(0).integers(5, 100, 250).tolist()
    async with world.client() as client:
        version = await world.load(client, 1)
        values = await client.prompt_logprobs(tokens)
    assert values[0] == 0
    assert values[1:] == pytest.approx(world.logprobs(version, tokens)[1:], abs=TOLERANCE)


async def test_new_weights_in_mid_generation_tear_no_token(world):
    """Each token is of the weights that its span names, over everything before it: no old cache is mixed in."""
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    samples = []

    async def generate():
        samples.extend(await client.generate(prompt, 8, params))

    async with world.client() as client:
        prompt = await client.tokenize(HI)
        await world.load(client, 1)
        for attempt in range(30):  # until an update meets a generation
            samples.clear()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generate)
                await anyio.sleep(0.05 * (attempt + 1))  # later and later: it may take long to begin
                await world.load(client, attempt % 2)
            if max(len(sample.weight_versions) for sample in samples) >= 2:
                break
    assert max(len(sample.weight_versions) for sample in samples) >= 2
    for sample in samples:
        tokens = [*prompt, *sample.token_ids.tolist()]
        for span in sample.weight_versions:
            right = world.logprobs(span.version, tokens)[len(prompt) :][span.start : span.end]
            assert sample.logprobs[span.start : span.end] == pytest.approx(right, abs=TOLERANCE)


async def test_weights_that_do_not_fit_are_refused_by_name_and_the_old_ones_go_on(world):
    tensors = policy_tensors(sharp_policy(2).model)
    some = sorted(tensors)[1]
    wrong = {
        "bfloat16": {name: tensor.bfloat16() for name, tensor in tensors.items()},
        f"missing: {some}": {name: tensor for name, tensor in tensors.items() if name != some},
        "not finite": {**tensors, some: tensors[some] * torch.nan},
        rf"{some} is float32\[1\]": {**tensors, some: torch.zeros(1)},
    }
    async with world.client() as client:
        before = await world.load(client, 1)
        for step, (text, bad) in enumerate(wrong.items()):
            version = policy_version(step, "bad", bad)
            with pytest.raises(DataError, match=f"400.*{text}"):
                await client.update_weights(str(write_weights(bad, world.weights, version)), str(version))
        good = policy_version(9, "a", tensors)
        outside = write_weights(tensors, world.weights.parent / "elsewhere", good)
        for path, text in [(outside, "alone"), (world.weights / "gone.safetensors", "does not exist")]:
            with pytest.raises(DataError, match=text):
                await client.update_weights(str(path), str(good))
        assert await client.weight_version() == before
        (sample,) = await client.generate([1, 20], 1, SamplingParams(max_tokens=10))
    right = world.logprobs(before, [1, 20, *sample.token_ids.tolist()])[2:]
    assert sample.logprobs == pytest.approx(right, abs=TOLERANCE)


async def test_an_update_that_somebody_left_unfinished_is_dropped(world):
    bearing = {"Authorization": f"Bearer {TOKEN}"}
    async with world.client() as client, httpx.AsyncClient(base_url=world.url, headers=bearing) as http:
        await world.load(client, 0)
        left, (path, _) = list(world.published.items())[1]
        assert (await http.post("/start_weight_update")).is_success
        info = {"update_info": {"path": str(path), "version": left}}
        assert (await http.post("/update_weights", json=info)).is_success
        version = await world.load(client, 0)
        (sample,) = await client.generate([1, 20], 1, SamplingParams(max_tokens=10))
    right = world.logprobs(version, [1, 20, *sample.token_ids.tolist()])[2:]
    assert sample.logprobs == pytest.approx(right, abs=TOLERANCE)
    assert {span.version for span in sample.weight_versions} == {version}


@pytest.mark.parametrize("prompt", [[], [1] * 300, [100_000]])
async def test_what_can_never_be_served_is_not_to_be_tried_again(world, prompt):
    async with world.client() as client:
        with pytest.raises(DataError):
            await client.generate(prompt, 1, SamplingParams(max_tokens=5))
        assert await client.ready()
