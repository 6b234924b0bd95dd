"""Every number and list of every HTTP body beyond its bound is refused by name: no route fails, and none is held up."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from integration.security.test_routes import KEY, TOKEN, _gateway, application, endpoint, inference

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus

__all__ = ["application", "endpoint", "inference"]

World = _gateway.World

DEEP = "@deep"
"""Stands for a value that is nested 5,000 levels deep."""
LARGE = [1 << 63, 1 << 64, -(1 << 70), 10**400, 1e308, float("inf"), DEEP]
SAMPLING = {
    "n": 1, "temperature": 1.0, "top_p": 0.9, "max_tokens": 1, "seed": 1, "stop_token_ids": [1], "stop": ["x"],
    "skip_special_tokens": True, "ignore_eos": False, "logprobs": 1, "prompt_logprobs": 1,
}  # fmt: skip
OPEN = {
    "n": 1, "temperature": 1.0, "top_p": 0.9, "max_tokens": 1, "seed": 1, "stop_token_ids": [1], "stop": ["x"],
    "stream": False, "stream_options": {"include_usage": True}, "user": "me", "metadata": {"a": 1}, "priority": 1,
    "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "min_p": 0, "top_k": -1, "best_of": 1,
    "min_tokens": 0, "repetition_penalty": 1,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "n": 1}}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [CALL]}]
INFERENCE: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "a", "add_special_tokens": True}),
    ("/tokenize", {"messages": MESSAGES, "tools": [TOOL], "chat_template_kwargs": {"a": 1}}),
    ("/detokenize", {"tokens": [1]}),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": SAMPLING, "request_id": "a"}),
    ("/v1/chat/completions", {"messages": MESSAGES[:1], "logprobs": True, "top_logprobs": 1, "tools": [TOOL],
                              "chat_template_kwargs": {"a": 1}, "max_completion_tokens": 1, **OPEN}),
    ("/v1/completions", {"prompt": ["a", [1]], "logprobs": 1, "echo": False, **OPEN}),
    ("/v1/completions", {"prompt": [1, 2], **OPEN}),
    ("/generate", {"prompt": {"prompt_token_ids": [1]}, "n": 1, "max_tokens": 1, "seed": 1, "logprobs": 1,
                   "prompt_logprobs": 1, "stop": ["x"], "stop_token_ids": [1], "min_tokens": 0}),
    ("/generate", {"input_ids": [1], "return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0,
                   "rid": "a", "sampling_params": {"max_new_tokens": 1, "n": 1, "sampling_seed": 1,
                                                   "stop_token_ids": [1], "min_new_tokens": 0}}),
    ("/update_weights", {"update_info": {"path": "a", "version": "1-a-b"}}),
    ("/finish_weight_update", {"weight_version": "1-a-b"}),
]  # fmt: skip
GATEWAY: list[tuple[str, dict[str, Any]]] = [
    ("/register-env", {"max_token_length": 64, "desired_name": "words", "weight": 1.0, "group_size": 2,
                       "min_batch_allocation": 0.5}),
    ("/disconnect-env", {"env_id": 0}),
    ("/register", {"wandb_group": "a", "wandb_project": "b", "batch_size": 4, "max_token_len": 64,
                   "checkpoint_dir": "c", "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 10}),
    ("/scored_data", {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0],
                      "advantages": [[0.0, 0.0], [0.0, 0.0]], "ref_logprobs": [[0.0, 0.0], [0.0, 0.0]],
                      "messages": [[{"role": "user", "content": "a", "n": 1}], [{"role": "user", "content": "a"}]],
                      "generation_params": {"temperature": 1.0, "top_k": 1, "x": [1]},
                      "inference_logprobs": [[1.0, -1.0], [1.0, -1.0]], "overrides": [{"a": 1}, {"b": 1}],
                      "group_overrides": {"a": 1}, "images": None, "env_id": 0,
                      "distill_token_ids": [[[1], [2]], [[1], [3]]],
                      "distill_logprobs": [[[0.0], [0.0]], [[0.0], [0.0]]]}),
]  # fmt: skip
ENDPOINT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "m", "n": 1, "max_tokens": 1, "seed": 1, "temperature": 1.0, "top_p": 0.9,
                              "stop": ["x"], "logprobs": False, "stream": False, "metadata": {"a": 1},
                              "tools": [TOOL], "tool_choice": "auto", "stream_options": {"include_usage": True},
                              "messages": [*MESSAGES, {"role": "tool", "content": "x", "tool_call_id": "a"}]}),
    ("/v1/responses", {"model": "m", "instructions": "i", "max_output_tokens": 1, "temperature": 1.0, "top_p": 0.9,
                       "tools": [{"type": "function", "name": "f", "parameters": {"n": 1}, "strict": False}],
                       "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                                 {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                                 {"type": "function_call_output", "call_id": "c", "output": "3"}]}),
    ("/v1/messages", {"model": "m", "max_tokens": 1, "system": [{"type": "text", "text": "s"}], "temperature": 1.0,
                      "tools": [{"name": "f", "description": "d", "input_schema": {"n": 1}}],
                      "tool_choice": {"type": "auto"}, "stop_sequences": ["x"], "metadata": {"user_id": "x"},
                      "messages": [{"role": "user", "content": "a"},
                                   {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f",
                                                                      "input": {"a": 1}}]},
                                   {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
                                                                 "content": [{"type": "text", "text": "3"}]}]}]}),
]  # fmt: skip
ODD = [1 << 64, -(1 << 70), 10**400, float("inf"), DEEP, None, "", [], {}, [[]], -1]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a body."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = changed(copied[path[0]], path[1:], new)
    return copied


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


async def ask(http: httpx.AsyncClient, path: str, body: Any, secret: str = TOKEN, levels: int = 5000) -> httpx.Response:
    deep = '{"a":[' * (levels // 2) + "1" + "]}" * (levels // 2)
    content = json.dumps(body).replace("Infinity", "1e999").replace(f'"{DEEP}"', deep)
    try:
        return await http.post(path, content=content, headers={"authorization": f"Bearer {secret}"})
    except Exception as error:
        raise AssertionError(f"{path} fails for {content[:600]}: {error!r}") from error


async def check(http: httpx.AsyncClient, path: str, body: dict[str, Any], values: list[Any]) -> None:
    for place in places(body):
        for value in values:
            answer = await ask(http, path, changed(body, place, value))
            assert answer.status_code < 500, (path, place, str(value)[:50], answer.text[:300])


@pytest.fixture
async def observed(make_lab: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway whose run another trainer trains, without a token."""
    async with MemoryBus() as bus:
        world = World(make_lab(bus))
        await world.policy()
        async with world.gateway(msgspec.structs.replace(world.config(), mode="observe")) as http:
            yield http
            assert (await http.get("/status")).status_code == 200


@pytest.mark.parametrize(("path", "body"), INFERENCE)
async def test_the_inference_server_outlives_numbers_beyond_their_range(
    inference: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    assert (await ask(inference, path, body)).status_code < 500
    await check(inference, path, body, LARGE)


@pytest.mark.parametrize(("path", "body"), GATEWAY)
async def test_the_gateway_outlives_numbers_beyond_their_range(
    observed: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    await check(observed, path, body, [1 << 64, 10**400])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/register-env", changed(GATEWAY[0][1], ("max_token_length",), 1 << 70)),
        ("/register-env", changed(GATEWAY[0][1], ("max_token_length",), 1 << 31)),
        ("/disconnect-env", {"env_id": 1 << 70}),
        ("/register", changed(GATEWAY[2][1], ("num_steps",), 1 << 70)),
        ("/register", changed(GATEWAY[2][1], ("starting_step",), 1 << 60)),
        ("/scored_data", changed(GATEWAY[3][1], ("generation_params", "top_k"), 1 << 70)),
        ("/scored_data", changed(GATEWAY[3][1], ("messages", 0, 0, "n"), 10**30)),
    ],
)
async def test_the_gateway_names_the_number_that_it_refuses(
    observed: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    place = next(path[-1] for path in places(body) if isinstance(at(body, path), int) and at(body, path) >= 1 << 31)
    answer = await ask(observed, path, body)
    assert answer.status_code == 422
    assert place in answer.text


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 1001}, ["stop_token_ids", "1000"]),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 17}, ["stop", "16"]),
        ("/v1/completions", {"prompt": "a", "stop": ["x" * 1001]}, ["stop", "1000"]),
        ("/v1/completions", {"prompt": ["a"] * 65}, ["prompt", "64"]),
        ("/v1/completions", {"prompt": "a", "n": 257}, ["n is 257", "256"]),
        ("/v1/completions", {"prompt": "a", "logprobs": 101}, ["logprobs", "100"]),
        ("/v1/completions", {"prompt": "a", "seed": 1 << 70}, ["seed", "64"]),
        ("/v1/completions", {"prompt": "a", "best_of": 1 << 40}, ["best_of"]),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(5000)}}, ["logit_bias"]),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"k" * 200_000: 1}]}, ["characters"]),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"a": [1] * 200_000}]}, ["characters"]),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 50_000}, ["characters"]),
    ],
)
async def test_every_list_of_a_request_has_a_bound_that_its_refusal_says(
    inference: httpx.AsyncClient, path: str, body: dict[str, Any], named: list[str]
) -> None:
    answer = await ask(inference, path, body)
    assert answer.status_code == 400
    assert all(one in answer.text for one in named), answer.text


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), ENDPOINT)
async def test_the_endpoint_outlives_values_that_do_not_belong_there(
    endpoint: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    assert (await ask(endpoint, path, body, KEY)).status_code == 200
    for place in places(body):
        for value in ODD:
            answer = await ask(endpoint, path, changed(body, place, value), KEY)
            assert answer.status_code < 500, (path, place, str(value)[:50], answer.text[:300])


@pytest.mark.parametrize(("path", "body"), ENDPOINT)
async def test_the_endpoint_names_how_deep_a_request_may_be(
    endpoint: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    for levels in (32, 500, *range(900, 1000, 4)):  # what can still be read may be too deep to be written again
        for place in (("tools", 0), ("messages", 0), ("input", 0), ("metadata",)):
            if place[0] in body:
                answer = await ask(endpoint, path, changed(body, place, DEEP), KEY, levels)
                assert answer.status_code == 400, (levels, place, answer.text)
                assert "nested deeper than" in answer.text or "maximum recursion depth" in answer.text
