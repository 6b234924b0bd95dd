"""How samples end on every route: any end token, stop strings that are special tokens, and what of them is text."""

import json

import httpx
import pytest
import torch

from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.model.end_tokens import end_tokens

PROMPT = [1, 5, 6]
WORDS = [20, 21, 4, 22, 3, 23, 2]  # letters; 4 unknown, 3 a separator and 2 the end: special tokens


@pytest.fixture
def scripted(policy, start_engine):
    """The policy says WORDS, one after the other, whatever the prompt."""
    forward = policy.model.forward

    def spoken(input_ids, position_ids=None, **given):
        output = forward(input_ids=input_ids, position_ids=position_ids, **given)
        place = position_ids[:, -1] - (len(PROMPT) - 1)
        output.logits[:, -1].fill_(-30.0)
        for row, at in enumerate(place.clamp(0, len(WORDS) - 1).tolist()):
            output.logits[row, -1, WORDS[at]] = 30.0
        return output

    def start(**config):
        policy.model.forward = forward
        policy.model.generation_config.eos_token_id = config.pop("ends", [2])
        ends = end_tokens(policy.model, policy.tokenizer)
        engine = start_engine(ends=ends, decode=policy.tokenizer.decode)
        policy.model.forward = spoken  # after the engine has found how to decode it
        return engine

    yield start
    policy.model.forward = forward


@pytest.fixture
def serve(policy, scripted, tmp_path):
    """Return a function that answers a request by a server with these end tokens."""

    async def ask(path, *, ends=(2,), **body):
        with scripted(ends=list(ends)) as engine:
            app = build_app(policy, engine, model_name="policy", weights_folder=tmp_path)
            async with httpx.AsyncClient(base_url="http://test", transport=httpx.ASGITransport(app)) as http:
                answer = await http.post(path, json=body)
                assert answer.status_code == 200, answer.text
                return answer

    return ask


async def everywhere(serve, ends=(2,), **sampling):
    """Return tokens and text of the same sample by each route, and by both streams."""
    params = {"temperature": 0, "max_tokens": 10, **sampling}
    found = {}
    body = (await serve("/inference/v1/generate", ends=ends, token_ids=PROMPT, output_mode="text",
                        sampling_params=params)).json()  # fmt: skip
    found["ids"] = (body["choices"][0]["token_ids"], body["choices"][0]["text"])
    body = (await serve("/v1/completions", ends=ends, prompt=PROMPT, return_token_ids=True, **params)).json()
    found["completions"] = (body["choices"][0]["token_ids"], body["choices"][0]["text"])
    body = (await serve("/generate", ends=ends, prompt={"prompt_token_ids": PROMPT}, **params)).json()
    found["vllm"] = (body["token_ids"][0], body["text"][0])
    renamed = {"max_new_tokens" if name == "max_tokens" else name: value for name, value in params.items()}
    body = (await serve("/generate", ends=ends, input_ids=PROMPT, sampling_params=renamed)).json()
    found["sglang"] = (body["output_ids"], body["text"])
    answer = await serve("/v1/completions", ends=ends, prompt=PROMPT, return_token_ids=True, stream=True, **params)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    found["stream"] = (
        [token for one in choices for token in one["token_ids"]],
        "".join(one["text"] for one in choices),
    )
    first = found["ids"]
    assert set(map(str, found.values())) == {str(first)}, found
    return first


@pytest.mark.parametrize("ends", [(2, 22), (22,), (2, 22, 9)])
async def test_every_end_token_ends_a_sample_and_is_no_part_of_its_text(serve, policy, ends):
    tokens, text = await everywhere(serve, ends=ends)
    assert tokens == WORDS[:4]
    assert text == policy.tokenizer.decode(WORDS[:2])
    assert (await everywhere(serve, ends=ends, ignore_eos=True, max_tokens=6))[0] == WORDS[:6]


@pytest.mark.parametrize(
    ("stop", "ids", "shown"),
    [("<|sep|>", 5, [20, 21, 22]), ("<|unk|>", 3, [20, 21]), ("<|eos|>", 7, [20, 21, 22, 23])],
)
async def test_a_stop_string_that_is_a_special_token_stops(serve, policy, stop, ids, shown):
    tokens, text = await everywhere(serve, stop=[stop], ignore_eos=True)
    assert tokens == WORDS[:ids]
    assert text == policy.tokenizer.decode(shown)


async def test_a_stop_string_may_begin_with_letters_and_end_with_a_special_token(serve, policy):
    letter = policy.tokenizer.decode([22])
    tokens, text = await everywhere(serve, stop=[f"{letter}<|sep|>"])
    assert tokens == WORDS[:5]
    assert text == policy.tokenizer.decode([20, 21])
    tokens, text = await everywhere(serve, stop=[f"<|sep|>{policy.tokenizer.decode([23])}"])
    assert tokens == WORDS[:6]
    assert text == policy.tokenizer.decode([20, 21, 22])


async def test_a_part_of_a_special_tokens_name_stops_nothing(serve, policy):
    tokens, text = await everywhere(serve, stop=["s", "|", "sep|>", "nk|>"])
    assert tokens == WORDS
    assert text == policy.tokenizer.decode([20, 21, 22, 23])


async def test_special_tokens_are_shown_where_that_is_asked_for(serve, policy):
    tokens, text = await everywhere(serve, skip_special_tokens=False)
    assert tokens == WORDS
    assert text == policy.tokenizer.decode(WORDS[:-1], skip_special_tokens=False)
    assert "<|sep|>" in text
    tokens, text = await everywhere(serve, skip_special_tokens=False, stop=["<|sep|>"])
    assert text == policy.tokenizer.decode(WORDS[:4], skip_special_tokens=False)


async def test_stop_token_ids_are_bounded(policy, scripted, tmp_path):
    with scripted() as engine:
        app = build_app(policy, engine, model_name="policy", weights_folder=tmp_path)
        async with httpx.AsyncClient(base_url="http://test", transport=httpx.ASGITransport(app)) as http:
            many = {"prompt": PROMPT, "stop_token_ids": [7] * 5000}
            answer = await http.post("/v1/completions", json=many)
    assert answer.status_code == 400
    assert "stop_token_ids" in answer.text


def test_the_policy_is_what_it_was(policy):
    with torch.no_grad():
        assert policy.model(torch.tensor([PROMPT])).logits.abs().max() < 30
