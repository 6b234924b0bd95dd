"""What every inference server owes a run, on the reference server and on real vLLM: one client, one set of tests.

Both hold the same model in float32, and a forward pass of transformers says what is right.
"""

import anyio
import httpx
import msgspec
import numpy as np
import pytest
import torch
from contract.inference_servers import KEY, TOKEN, reference, sharp_policy, vllm

from lachesis.pipeline.errors import AccessError, InfrastructureError
from lachesis.pipeline.inference.access import CONTROL_PATHS
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.prompt_tree import prompt_tree
from lachesis.pipeline.inference.protocol import LoadedWeights, SamplingParams, StructuredOutputs
from lachesis.pipeline.inference.serving.app import SAMPLING_PATHS
from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.policy import ModelSetup, save_policy
from lachesis.pipeline.model.tensors import policy_tensors, policy_version, weights_digest
from lachesis.pipeline.model.weight_files import write_weights
from lachesis.pipeline.trainer.adapters import load_trainable_model
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion

pytestmark = pytest.mark.timeout(3600)

TOLERANCE = 1e-4
"""Nats between two float32 implementations."""
BEARING = {"Authorization": f"Bearer {TOKEN}"}
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
        return InferenceClient(ClientConfig(url=self.url, timeout=600, connect_timeout=60), token=TOKEN)

    def http(self, secret=KEY):
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=600)

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
        rest = await client.prompt_top_logprobs(tokens, 3, 200)
    assert values[0] == 0
    right = world.logprobs(version, tokens)
    assert values[1:] == pytest.approx(right[1:], abs=TOLERANCE)
    assert rest.logprobs == pytest.approx(right[200:], abs=TOLERANCE)
    assert rest.ids.shape == rest.top.shape == (50, 3)
    assert (rest.top[:, 0] >= rest.logprobs).all()
    assert rest.version == version


async def test_branches_of_a_prompt_are_scored_as_its_own_prompts_by_a_server_that_says_so_and_ignored_by_others(world):
    tokens = np.random.default_rng(1).integers(5, 100, 120).tolist()
    forks = [(*tokens[:80], *tokens[20:50]), (*tokens,), (*tokens[:30], 7, 8)]
    paths = prompt_tree(forks)
    async with world.client() as client:
        version = await world.load(client, 1)
        if (await client.probe()).branches:
            found = await client.prompt_tree_logprobs(paths, 2)
            for path, answer in zip(paths, found, strict=True):
                right = world.logprobs(version, list(path.tokens))
                assert answer.version == version
                assert answer.logprobs[path.shared == 0 :] == pytest.approx(right[max(1, path.shared) :], abs=TOLERANCE)
            return
        with pytest.raises(InfrastructureError, match="answered about 0 branches of 2"):
            await client.prompt_tree_logprobs(paths, 2)
        assert await client.ready()


@pytest.mark.slow
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


@pytest.mark.parametrize("rank", [4, 32])
async def test_trained_adapters_arrive(world, rank):
    """Samples are those of the model with its adapters, and the server holds the weights of the version that it names.

    Adapters travel merged. Real vLLM gives the digest of the parameters that it computes with.
    """
    lora = LoraConfig(rank=rank, alpha=2.0 * rank)
    policy = load_trainable_model(world.weights.parent / "model", ModelSetup(lora=lora, seed=rank))
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:  # zero in a fresh one, which changes nothing
                parameter.normal_(0, 0.3 / rank**0.5)
    tensors = policy_tensors(policy.model)
    version = str(policy_version(rank, "lora", tensors))
    path = write_weights(tensors, world.weights, PolicyVersion.parse(version))
    world.published[version] = (path, policy)
    async with world.client() as client:
        base = await world.load(client, 0)
        before = await client.loaded_weights()
        assert await client.update_weights(str(path), version) is None, "the digest was not compared"
        after = await client.loaded_weights()
        assert await client.weight_version() == version
        (sample,) = await client.generate([1, 20], 1, SamplingParams(max_tokens=40, ignore_eos=True))
        await world.load(client, 0)
        assert await client.loaded_weights() == before
    if before is not None:  # the reference server has compared the very tensors that it computes with
        assert before == [LoadedWeights(digest=weights_digest(policy_tensors(world.policies[0].model)))]
        assert after == [LoadedWeights(digest=weights_digest(tensors))]
    tokens = [1, 20, *sample.token_ids.tolist()]
    assert sample.logprobs == pytest.approx(world.logprobs(version, tokens)[2:], abs=TOLERANCE)
    apart = np.abs(world.logprobs(version, tokens) - world.logprobs(base, tokens)).max()
    assert apart > 100 * TOLERANCE, "these adapters change nothing, so the test shows nothing"


class Losing(httpx.AsyncHTTPTransport):
    """Has vLLM load the checkpoint that it was started with over each update, as if that had never arrived."""

    async def handle_async_request(self, request):
        answer = await super().handle_async_request(request)
        if request.url.path == "/finish_weight_update":
            url = request.url.copy_with(path="/collective_rpc")
            reload = httpx.Request("POST", url, headers=BEARING, json={"method": "reload_weights"})
            assert (await super().handle_async_request(reload)).status_code == 200
        return answer


async def test_other_weights_than_those_delivered_are_named_and_nothing_is_sampled_from_them(world):
    async with world.client() as client, world.http() as http:
        if await client.loaded_weights() is None:
            pytest.skip("the reference server computes with the tensors whose digest it has compared")
        await world.load(client, 0)
        version, (path, _) = list(world.published.items())[1]
        config = ClientConfig(url=world.url, timeout=600)
        async with InferenceClient(config, token=TOKEN, transport=Losing()) as losing:
            held, said = (PolicyVersion.parse(name).digest for name in list(world.published)[:2])
            text = f"computes with other weights than those of policy {version}, .* digest is {held}, not {said}"
            with pytest.raises(InfrastructureError, match=text):
                await losing.update_weights(str(path), version)
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        assert await world.load(client, 1) == version
        assert (await http.get("/is_paused")).json() == {"is_paused": False}
        (sample,) = await client.generate([1, 20], 1, SamplingParams(max_tokens=10))
    right = world.logprobs(version, [1, 20, *sample.token_ids.tolist()])[2:]
    assert sample.logprobs == pytest.approx(right, abs=TOLERANCE)


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
    async with world.client() as client, httpx.AsyncClient(base_url=world.url, headers=BEARING, timeout=600) as http:
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


async def post(http, path, **body):
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("secret", [None, "other", KEY.upper()])
async def test_nobody_is_answered_without_the_key(world, secret):
    async with world.http(secret) as http:
        assert (await http.get("/health")).status_code == 200
        for method, path in [
            *(("GET", path) for path in ("/v1/models", "/weight_info", "/is_paused")),
            *(("POST", path) for path in ("/tokenize", "/detokenize", *sorted(SAMPLING_PATHS), *sorted(CONTROL_PATHS))),
        ]:
            answer = await http.request(method, path, json={} if method == "POST" else None)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "AuthenticationError"), path
    async with InferenceClient(ClientConfig(url=world.url), token=secret) as client:
        with pytest.raises(AccessError, match=r"inference\.ROLE\.key_file"):
            await client.probe()


async def test_the_key_samples_and_changes_nothing(world):
    async with InferenceClient(ClientConfig(url=world.url), token=KEY) as client:
        await client.probe()
        with pytest.raises(AccessError, match="state"):
            await client.pause()
    async with world.http() as http:
        for path in (*sorted(CONTROL_PATHS), "/collective_rpc", "/sleep", "/update_weight_version", "/reset_mm_cache"):
            assert (await http.post(path, json={})).status_code in {401, 404}, path
        assert (await http.get("/is_paused")).json() == {"is_paused": False}


async def test_generate_answers_as_vllms_api_server(world):
    prompt = [1, 22, 23, 3]
    async with world.client() as client, world.http() as http:
        version = await world.load(client, 1)
        answer = await post(http, "/generate", prompt={"prompt_token_ids": prompt}, n=2, max_tokens=9, logprobs=0)
        seeded = [
            await post(http, "/generate", prompt="hi there", max_tokens=9, logprobs=2, seed=3, stop=["zzz"])
            for _ in range(2)
        ]
        scored = await post(http, "/generate", prompt="hi", prompt_logprobs=1, max_tokens=1, temperature=0)
        refused = [
            await http.post("/generate", json=body)
            for body in ({}, {"prompt": "a", "stream": True}, {"prompt": {"prompt_token_ids": [100_000]}})
        ]
    assert answer["prompt_token_ids"] == prompt
    tokenizer = world.policies[0].tokenizer
    assert answer["prompt"] == tokenizer.decode(prompt)
    for tokens, positions, text in zip(answer["token_ids"], answer["logprobs"], answer["text"], strict=True):
        assert [[int(token) for token in position[0]] for position in positions] == [[token] for token in tokens]
        values = [next(iter(position[0].values())) for position in positions]
        assert values == pytest.approx(world.logprobs(version, [*prompt, *tokens])[len(prompt) :], abs=TOLERANCE)
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer["finish_reasons"] == ["stop" if tokens[-1] == 2 else "length" for tokens in answer["token_ids"]]
    assert seeded[0] == seeded[1]
    assert {len(position[0]) for position in seeded[0]["logprobs"][0]} <= {2, 3}
    ids, values = scored["prompt_token_ids"], scored["prompt_logprobs"]
    right = world.logprobs(version, ids)
    assert values[0] is None
    assert [values[at][str(ids[at])] for at in range(1, len(ids))] == pytest.approx(right[1:], abs=TOLERANCE)
    assert [one.status_code for one in refused] == [400] * 3
    assert "stream" in refused[1].json()["error"]["message"]


async def test_generate_answers_as_sglang(world):
    prompt = [1, 22, 23, 3]
    asked = {"input_ids": prompt, "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    async with world.client() as client, world.http() as http:
        version = await world.load(client, 0)
        answers = await post(http, "/generate", **asked, sampling_params={"max_new_tokens": 9, "n": 3})
        one = await post(http, "/generate", text="hi", sampling_params={"max_new_tokens": 4, "ignore_eos": True})
        letter = one["text"][1]
        stop = {"max_new_tokens": 40, "stop": [letter], "sampling_seed": 1, "ignore_eos": True}
        stopped = await post(http, "/generate", text="hi", sampling_params=stop)
    decode = world.policies[0].tokenizer.decode
    assert len(answers) == 3
    for answer in answers:
        tokens, about = answer["output_ids"], answer["meta_info"]
        assert [entry[1:] for entry in about["output_token_logprobs"]] == [[token, decode([token])] for token in tokens]
        right = world.logprobs(version, [*prompt, *tokens])[len(prompt) :]
        assert [entry[0] for entry in about["output_token_logprobs"]] == pytest.approx(right, abs=TOLERANCE)
        for sampled, top in zip(about["output_token_logprobs"], about["output_top_logprobs"], strict=True):
            assert len(top) == 2
            assert top[0][0] >= top[1][0]
            assert sampled[0] <= top[0][0] + TOLERANCE
        ended = {"type": "stop", "matched": 2} if tokens[-1] == 2 else {"type": "length", "length": 9}
        assert about["finish_reason"] == ended
        assert (about["weight_version"], about["prompt_tokens"]) == (version, len(prompt))
    assert one["meta_info"]["completion_tokens"] == 4
    if stopped["meta_info"]["finish_reason"]["type"] == "stop":
        assert stopped["meta_info"]["finish_reason"]["matched"] == letter
        assert letter not in stopped["text"]


async def test_openais_routes_give_the_tokens_as_they_were_sampled(world):
    async with world.client() as client, world.http() as http:
        version = await world.load(client, 1)
        rendered = await client.tokenize(HI)
        for model in ("policy", "default", None):
            body = {"messages": HI, "max_tokens": 9, "n": 2, "logprobs": True, "return_token_ids": True, "seed": 5}
            chat = await post(http, "/v1/chat/completions", **body, **({"model": model} if model else {}))
            assert chat["prompt_token_ids"] == rendered
            for choice in chat["choices"]:
                tokens = choice["token_ids"]
                right = world.logprobs(version, [*rendered, *tokens])[len(rendered) :]
                values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                assert values == pytest.approx(right, abs=TOLERANCE)
        text = await post(http, "/v1/completions", prompt=rendered, max_tokens=9, return_token_ids=True, logprobs=0)
        (choice,) = text["choices"]
        right = world.logprobs(version, [*rendered, *choice["token_ids"]])[len(rendered) :]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(right, abs=TOLERANCE)
        body = {"messages": HI, "max_tokens": 9, "seed": 7, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as streamed:
            lines = [line.removeprefix("data: ") async for line in streamed.aiter_lines() if line]
        whole = await post(http, "/v1/chat/completions", **{**body, "stream": False})
        missing = await http.post("/v1/chat/completions", json={"messages": HI, "model": "gpt-5"})
    pieces = [msgspec.json.decode(line)["choices"] for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    said = "".join(choice["delta"].get("content") or "" for choices in pieces for choice in choices)
    assert said == whole["choices"][0]["message"]["content"]
    assert missing.status_code == 404


async def test_tools_that_the_chat_template_does_not_read_are_refused_by_the_reference_server_alone(world, request):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": HI, "tools": [tool], "max_tokens": 5}
    async with world.http() as http:
        if request.node.callspec.id != "reference":
            answer = await post(http, "/v1/chat/completions", **body)
            assert answer["choices"][0]["message"]["role"] == "assistant"
            return
        answer = await http.post("/v1/chat/completions", json={"model": "policy", **body})
    assert answer.status_code == 400
    assert "does not read `tools`" in answer.text


async def test_constrained_answers_match_and_have_the_logprobs_of_what_was_allowed(world, request):
    """Of real vLLM alone: the reference server says that it cannot. Such logprobs are no trainer's."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    closed = {**schema, "additionalProperties": False}
    call = {
        "type": "tag",
        "begin": "<tool_call>",
        "content": {"type": "json_schema", "json_schema": closed},
        "end": "!",
    }
    opened = [{"type": "tag", "begin": "", "content": {"type": "any_text", "max_tokens": 9}, "end": "</think>"}, call]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": opened}}
    forms = [StructuredOutputs(json=closed), StructuredOutputs(structural_tag=msgspec.json.encode(tag).decode())]
    async with world.client() as client:
        version = await world.load(client, 1)
        prompt = await client.tokenize(HI)
        for form in forms:
            params = SamplingParams(max_tokens=120, seed=3, structured_outputs=form)
            if request.node.callspec.id == "reference":
                with pytest.raises(DataError, match="vLLM can"):
                    await client.generate(prompt, 8, params)
                continue
            samples = await client.generate(prompt, 8, params)
            ended = [sample for sample in samples if sample.finish_reason == "stop"]
            assert ended
            for sample in ended:
                said = sample.text.partition("</think><tool_call>")[2].removesuffix("!") or sample.text
                assert msgspec.json.decode(said)["a"] in {"x", "y"}
                models = world.logprobs(version, [*prompt, *sample.token_ids.tolist()])[len(prompt) :]
                assert (sample.logprobs >= models - TOLERANCE).all()
                assert sample.logprobs.sum() > models.sum() + 1
