"""OpenAI's routes and `/generate`: exact tokens, streams equal to whole answers, tools, refusals by name."""

import json
import re
from functools import partial

import anyio
import httpx
import pytest
import torch

from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.requests import SampleRow
from lachesis.pipeline.inference.serving import openai_routes
from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.tasks import marked_calls

HI = [{"role": "user", "content": "hi there"}]
VERSION = "0-first-000000000000"
CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.fixture
def engine(policy, start_engine):
    with start_engine(decode=partial(policy.tokenizer.decode, skip_special_tokens=True)) as running:
        yield running


@pytest.fixture
def http(policy, engine, tmp_path):
    app = build_app(policy, engine, model_name="policy", weights_folder=tmp_path, aliases=["org/model"])
    return httpx.AsyncClient(base_url="http://test", transport=httpx.ASGITransport(app))


async def post(http, path, **body):
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(http, path, **body):
    async with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def logprobs_alone(policy, prompt, tokens):
    with torch.no_grad():
        values, _ = token_logprobs(policy.model, torch.tensor([[*prompt, *tokens]]), 1.0)
    return values[0, len(prompt) :].tolist()


async def test_a_chat_s_tokens_and_logprobs_are_those_that_were_sampled(http, policy):
    body = {"messages": HI, "n": 3, "max_tokens": 9, "seed": 1, "logprobs": True, "top_logprobs": 2}
    exact = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = await post(http, CHAT, model="policy", **body, **exact)
    prompt = answer["prompt_token_ids"]
    assert prompt == policy.tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        alone = logprobs_alone(policy, prompt, choice["token_ids"])
        assert [entry["logprob"] for entry in content] == pytest.approx(alone, abs=1e-5)
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        text = policy.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        assert choice["message"] == {"role": "assistant", "content": text}
        assert choice["weight_versions"][0]["version"] == VERSION
    written = sum(len(choice["token_ids"]) for choice in answer["choices"])
    read = len(prompt)
    assert answer["usage"] == {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


@pytest.mark.parametrize("stop", [None, "e", ["a", "or", "\\"]])
async def test_a_stream_is_the_whole_answer_in_pieces(http, stop):
    body = {"n": 2, "max_tokens": 40, "seed": 5, "stop": stop, "logprobs": True, "return_token_ids": True}
    whole = await post(http, CHAT, messages=HI, **body)
    found = await events(http, CHAT, messages=HI, stream_options={"include_usage": True}, **body)
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [part["choices"][0] for part in found[:-1] if part["choices"][0]["index"] == choice["index"]]
        assert parts[0]["delta"]["role"] == "assistant"
        assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [e for part in parts for e in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if stop is not None:
            assert all(one not in choice["message"]["content"] for one in stop)


async def test_completions_take_text_and_token_ids_several_at_once(http, policy):
    ids = policy.tokenizer.encode("abc")
    body = {"max_tokens": 6, "logprobs": 1, "return_token_ids": True, "ignore_eos": True, "temperature": 0}
    by_text = await post(http, TEXT, prompt="abc", **body)
    by_ids = await post(http, TEXT, prompt=ids, **body)
    both = await post(http, TEXT, prompt=[ids, "abc"], n=2, **body)
    (first,) = by_text["choices"]
    assert by_ids["choices"] == [first]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in both["choices"]} == {first["text"]}
    assert first["prompt_token_ids"] == ids
    told = first["logprobs"]
    assert told["token_logprobs"] == pytest.approx(logprobs_alone(policy, ids, first["token_ids"]), abs=1e-5)
    assert [len(one) for one in told["top_logprobs"]] == [1] * 6
    assert [first["text"][at] for at in told["text_offset"]] == list(first["text"])
    streamed = await events(http, TEXT, prompt="abc", **body)
    assert "".join(part["choices"][0]["text"] for part in streamed) == first["text"]


@pytest.mark.parametrize("prompt", ["abc", [[1, 5, 7, 9]], [[5, 7], [9, 7, 5, 5]]])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_has_its_logprobs_as_evaluation_harnesses_read_them(
    http, policy, prompt, max_tokens, stream
):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "seed": 1, "echo": True}
    if stream:
        (answer,) = await events(http, TEXT, **body)
    else:
        answer = await post(http, TEXT, **body)
    prompts = [policy.tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt
    assert len(answer["choices"]) == len(prompts)
    for ids, choice in zip(prompts, answer["choices"], strict=True):
        text, told = policy.tokenizer.decode(ids), choice["logprobs"]
        assert choice["text"].startswith(text)
        counts = {name: len(values) for name, values in told.items()}
        assert set(counts.values()) == {len(ids) + len(choice["logprobs"]["tokens"][len(ids) :])}
        assert len(told["tokens"]) - len(ids) <= max_tokens
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        assert told["token_logprobs"][1 : len(ids)] == pytest.approx(logprobs_alone(policy, ids[:1], ids[1:]), abs=1e-5)
        for logprob, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
            assert 1 <= len(top) <= 2
            assert max(top.values()) >= logprob
        assert told["text_offset"] == sorted(told["text_offset"])
        assert told["text_offset"][0] == 0
    if max_tokens == 0:
        assert answer["usage"]["completion_tokens"] == 0
        assert [choice["text"] for choice in answer["choices"]] == [policy.tokenizer.decode(ids) for ids in prompts]


async def test_an_echo_without_logprobs_is_the_text_alone(http):
    plain = await post(http, TEXT, prompt="abc", max_tokens=2, temperature=0)
    told = await post(http, TEXT, prompt="abc", max_tokens=2, temperature=0, echo=True)
    assert told["choices"][0]["text"] == "abc" + plain["choices"][0]["text"]
    assert told["choices"][0]["logprobs"] is None


@pytest.fixture
def says(engine, policy, monkeypatch):
    """Make the model write a text."""

    def make(text):
        tokens = [*policy.tokenizer.encode(text), policy.tokenizer.eos_token_id]
        append = SampleRow.append

        def appended(row, token, *rest, **named):
            append(row, tokens[len(row.tokens)], *rest, **named)

        monkeypatch.setattr(SampleRow, "append", appended)

    return make


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def test_tools_are_told_to_the_model_and_its_calls_are_read(http, policy, says):
    told = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    policy.tokenizer.chat_template = told + "{% for m in messages %}{{ m.content }}{% endfor %}"
    says(f"so {CALLS}")
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "return_token_ids": True}
    answer = await post(http, CHAT, **body)
    assert policy.tokenizer.decode(answer["prompt_token_ids"]) == "addx"
    (choice,) = answer["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {"role": "assistant", "content": "so"}
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    found = [part["choices"][0] for part in await events(http, CHAT, **body)]
    assert found[-1]["finish_reason"] == "tool_calls"
    assert found[-1]["delta"]["tool_calls"][0]["function"] == call["function"]
    assert "".join(part["delta"].get("content") or "" for part in found) == "so"
    untold = await post(http, CHAT, tool_choice="none", **body)
    assert untold["choices"][0]["message"]["content"] == f"so {CALLS}"
    assert policy.tokenizer.decode(untold["prompt_token_ids"]) == "x"


async def test_calls_behind_a_special_token_are_read(http, policy, says, monkeypatch):
    """Mistral's marker; a special token of the test's own tokenizer stands for it."""
    monkeypatch.setattr(marked_calls, "_MARKER", re.compile(r"<\|bos\|>"))
    monkeypatch.setattr(openai_routes, "CALL_TOKENS", ("<|bos|>",))
    policy.tokenizer.chat_template = "{{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    says('so <|bos|>[{"name": "add", "arguments": {"a": 1}}]')
    answer = await post(http, CHAT, messages=[{"role": "user", "content": "x"}], tools=TOOLS)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "so"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


async def test_messages_in_parts_and_calls_of_before_reach_the_template_as_it_wants_them(http, policy, says):
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}"
        "{% endfor %}{% endfor %}"
    )
    says("y")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "r", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 7}'}}]},
    ]
    answer = await post(http, CHAT, messages=messages, return_token_ids=True)
    assert policy.tokenizer.decode(answer["prompt_token_ids"]) == "pqr7"


async def test_generate_answers_as_vllm_does(http, policy):
    prompt = [1, 22, 23, 3]
    body = {"prompt": {"prompt_token_ids": prompt}, "n": 2, "max_tokens": 5, "logprobs": 0, "stop": "zz"}
    answer = await post(http, GENERATE, **body)
    for tokens, positions, text in zip(answer["token_ids"], answer["logprobs"], answer["text"], strict=True):
        assert [int(next(iter(position[0]))) for position in positions] == tokens
        values = [next(iter(position[0].values())) for position in positions]
        assert values == pytest.approx(logprobs_alone(policy, prompt, tokens), abs=1e-5)
        assert text == policy.tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer["finish_reasons"] == ["stop" if t[-1] == 2 else "length" for t in answer["token_ids"]]
    scored = await post(http, GENERATE, prompt="hi", prompt_logprobs=2, max_tokens=1, temperature=0.0)
    assert scored["prompt_logprobs"][0] is None
    assert str(scored["prompt_token_ids"][1]) in scored["prompt_logprobs"][1]


async def test_generate_answers_as_sglang_does(http, policy):
    prompt = [1, 22, 23, 3]
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 5, "n": 2}, "return_logprob": True}
    for answer in await post(http, GENERATE, **body):
        tokens = answer["output_ids"]
        told = answer["meta_info"]["output_token_logprobs"]
        assert [entry[1:] for entry in told] == [[token, None] for token in tokens]
        assert [entry[0] for entry in told] == pytest.approx(logprobs_alone(policy, prompt, tokens), abs=1e-5)
        ended = {"type": "stop", "matched": 2} if tokens[-1] == 2 else {"type": "length", "length": 5}
        assert answer["meta_info"]["finish_reason"] == ended
        assert answer["meta_info"]["weight_version"] == VERSION
    one = await post(http, GENERATE, text="hi", sampling_params={"max_new_tokens": 3})
    assert one["meta_info"]["completion_tokens"] == len(one["output_ids"])


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": HI, "frequency_penalty": 0.5}, 400, "frequency_penalty is 0.5"),
        (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, 400, "response_format"),
        (CHAT, {"messages": HI, "tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, {"messages": HI, "tool_choice": {"type": "function"}}, 400, "tool_choice"),
        (CHAT, {"messages": HI, "temprature": 1}, 400, "temprature"),
        (CHAT, {"messages": HI, "n": 0}, 400, "$.n"),
        (CHAT, {"messages": HI, "max_tokens": 0}, 400, "max_tokens"),
        (CHAT, {"messages": HI, "stop": [""]}, 400, "stop"),
        (CHAT, {"messages": HI, "stop": ["x"] * 17}, 400, "stop"),
        (CHAT, {"messages": HI, "model": "gpt-5"}, 404, "policy or org/model"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        (CHAT, {"messages": [{"role": "x", "tool_calls": [{"function": {"arguments": "{"}}]}]}, 400, "not JSON"),
        (CHAT, {"messages": HI, "stream": True, "max_tokens": 1000}, 400, "context"),
        (TEXT, {"prompt": []}, 400, "prompt"),
        (TEXT, {"prompt": [[1], 2]}, 400, "prompt"),
        (TEXT, {"prompt": [1, 10**9]}, 400, "token_ids"),
        (GENERATE, {"prompt": "a", "top_k": 5}, 400, "top_k"),
        (GENERATE, {"prompt": "a", "stream": True}, 400, "stream"),
        (GENERATE, {"text": "a", "input_ids": [1]}, 400, "exactly one"),
        (GENERATE, {"text": "a", "sampling_params": {"regex": "x"}}, 400, "regex"),
        (GENERATE, {}, 400, "prompt"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_name(http, path, body, status, words):
    answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]


async def test_what_changes_nothing_is_accepted(http):
    neutral = {"user": "u", "frequency_penalty": 0, "top_k": -1, "logit_bias": {}, "response_format": {"type": "text"}}
    for model in ("policy", "org/model"):
        assert (await post(http, CHAT, messages=HI, max_tokens=1, model=model, **neutral))["model"] == "policy"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_the_work(http, engine, stream):
    began = anyio.Event()
    original = engine.submit

    def submitted(*given, **named):
        began.set()
        future = original(*given, **named)
        futures.append(future)
        return future

    futures, engine.submit = [], submitted
    await wait_for(engine.pause("keep"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: http.post(CHAT, json={"messages": HI, "stream": stream}))
        await began.wait()
        tasks.cancel_scope.cancel()
    await wait_for(engine.resume())
    assert futures[0].cancelled()


async def wait_for(future):
    await anyio.to_thread.run_sync(future.result)


async def test_a_pause_that_aborts_ends_a_stream(http, engine):
    found = []

    async def read():
        found.extend(await events(http, CHAT, messages=HI, n=2))

    await wait_for(engine.pause("keep"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        while not engine.waiting:  # noqa: ASYNC110 - the engine's thread offers nothing to wait on
            await anyio.sleep(0.001)
        await wait_for(engine.pause("abort"))
    assert [part["choices"][0]["finish_reason"] for part in found] == ["abort", "abort"]


TEMPLATE = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}"
    "{{ m.tool_calls[0].function.arguments.a }}{% endif %}{{ m.role + m.content }}{% endfor %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}


@pytest.mark.parametrize(
    ("message", "right"),
    [
        # what a stock client sends back of our own answer: every field, those that are null included
        ({"content": None, "refusal": None, "annotations": None, "audio": None, "function_call": None,
          "tool_calls": [CALL]}, "17assistant"),
        ({"tool_calls": [CALL]}, "17assistant"),
        ({"content": "r", "tool_calls": None}, "assistantr"),
        ({"content": "r", "tool_calls": []}, "assistantr"),
        ({"content": None, "refusal": "no"}, "assistantno"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}, "assistantab"),
        ({"content": None, "function_call": CALL["function"]}, "17assistant"),
        ({"content": "r", "name": "x"}, "assistantr"),
    ],
)  # fmt: skip
async def test_a_message_may_have_every_form_that_openais_schema_allows(http, policy, message, right):
    policy.tokenizer.chat_template = TEMPLATE
    messages = [{"role": "assistant", **message}]
    body = await post(http, CHAT, messages=messages, max_tokens=1, return_token_ids=True)
    assert body["prompt_token_ids"] == policy.tokenizer.encode(right, add_special_tokens=False)
    assert (await post(http, "/tokenize", messages=messages))["tokens"] == body["prompt_token_ids"]


@pytest.mark.parametrize("role", ["system", "user", "tool"])
async def test_only_an_assistant_may_be_without_content(http, role):
    answer = await http.post(CHAT, json={"messages": [*HI, {"role": role, "content": None}]})
    assert answer.status_code == 400
    assert "messages[1] has no content" in answer.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ['"Beijing"', '["Beijing"]', "7"])
async def test_arguments_that_are_no_object_are_named(http, arguments):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = await http.post(CHAT, json={"messages": messages})
    assert answer.status_code == 400
    assert "'weather' are no JSON object" in answer.json()["error"]["message"]


async def test_a_template_that_wants_arguments_as_text_gets_them_so(http, policy):
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ 'f' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    body = await post(http, "/tokenize", messages=[{"role": "assistant", "tool_calls": [CALL]}])
    assert body["tokens"] == policy.tokenizer.encode('f{"a":7}', add_special_tokens=False)


@pytest.mark.parametrize(("opens", "text"), [("", f"<think>{CALLS}</think>y"), ("<think>", CALLS)])
async def test_calls_that_are_only_thought_of_stay_in_the_text(http, policy, says, opens, text):
    policy.tokenizer.chat_template = "{{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %}" + opens
    says(text)
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    (choice,) = (await post(http, CHAT, **body))["choices"]
    assert (choice["finish_reason"], choice["message"]) == ("stop", {"role": "assistant", "content": text})
    last = [part["choices"][0] for part in await events(http, CHAT, **body)][-1]
    assert (last["finish_reason"], last["delta"]["content"]) == ("stop", text)


async def test_parameters_of_the_template_are_served_and_tools_that_it_drops_refused(http, policy):
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '!' if shouts }}"
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "return_token_ids": True}
    told = await post(http, CHAT, chat_template_kwargs={"shouts": True}, **body)
    assert policy.tokenizer.decode(told["prompt_token_ids"]) == "x!"
    asked = {"messages": body["messages"], "chat_template_kwargs": {"shouts": True}}
    assert (await post(http, "/tokenize", **asked))["tokens"] == told["prompt_token_ids"]
    for wrong, text in (
        ({"tools": TOOLS}, "does not read `tools`"),
        ({"chat_template_kwargs": {"tools": 1}}, "not the"),
        ({"chat_template_kwargs": {"shout": True}}, "does not read 'shout', did you mean 'shouts'?"),
    ):
        answer = await http.post(CHAT, json={**body, **wrong})
        assert (answer.status_code, text in answer.text) == (400, True)
