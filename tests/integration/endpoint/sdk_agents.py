"""Agents over the official SDKs, one a dialect, as their documents write them. Run as programs of samples.

Each holds a conversation of four turns: plain, streamed, with a tool, and after the result of the tool.
"""

import json
import os
import sys
import urllib.request
from collections.abc import Callable
from functools import partial


def report(**rewards: float) -> None:
    body = json.dumps({"rewards": rewards}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["LACHESIS_SESSION_URL"] + "/reward", body, headers)  # noqa: S310
    urllib.request.urlopen(request, timeout=60).close()  # noqa: S310


def refusal(call: Callable[[], object], kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


def chat() -> str:
    from openai import BadRequestError, OpenAI

    client = OpenAI()
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    assert [model.id for model in client.models.list()] == ["policy"]
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "one"}]
    ask = partial(client.chat.completions.create, model="policy", tools=tools)
    answer = ask(messages=messages, temperature=0.5, logprobs=True)
    assert answer.choices[0].logprobs.content[0].logprob < 0
    assert answer.usage.total_tokens > 0
    messages += [answer.choices[0].message, {"role": "user", "content": "two"}]
    assert "response_format" in refusal(
        partial(ask, messages=messages, response_format={"type": "json_object"}), BadRequestError
    )
    stream = ask(messages=messages, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "tool"}]
    said = ask(messages=messages).choices[0].message
    (call,) = said.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1}
    messages += [said, {"role": "tool", "content": "3", "tool_call_id": call.id}]
    return ask(messages=messages).choices[0].message.content


def responses() -> str:
    from openai import OpenAI

    client = OpenAI()
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}]
    items = [{"role": "user", "content": "one"}]
    answer = client.responses.create(model="policy", instructions="be short", input=items, tools=tools)
    items += [*answer.output, {"role": "user", "content": "two"}]
    with client.responses.stream(model="policy", instructions="be short", input=items, tools=tools) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_response()
    items += [*answer.output, {"role": "user", "content": "tool"}]
    answer = client.responses.create(model="policy", instructions="be short", input=items, tools=tools)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"a": 1}
    answer = client.responses.create(
        model="policy",
        instructions="be short",
        tools=tools,
        previous_response_id=answer.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "3"}],
    )
    return answer.output_text


def messages() -> str:
    from anthropic import Anthropic, BadRequestError

    client = Anthropic()
    tools = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]
    given = {"model": "policy", "max_tokens": 300, "tools": tools, "system": [{"type": "text", "text": "be short"}]}
    history = [{"role": "user", "content": "one"}]
    answer = client.messages.create(**given, messages=history)
    assert answer.usage.output_tokens > 0
    history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "two"}]
    refused = partial(client.messages.create, **given, messages=history, tool_choice={"type": "any"})
    assert "tool_choice" in refusal(refused, BadRequestError)
    with client.messages.stream(**given, messages=history) as stream:
        text = "".join(stream.text_stream)
        answer = stream.get_final_message()
    assert "".join(block.text for block in answer.content if block.type == "text") == text
    history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "tool"}]
    with client.messages.stream(**given, messages=history) as stream:
        answer = stream.get_final_message()
    assert answer.stop_reason == "tool_use"
    call = answer.content[-1]
    assert call.input == {"a": 1}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
    history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    return client.messages.create(**given, messages=history).content[0].text


if __name__ == "__main__":
    final = {"chat": chat, "responses": responses, "messages": messages}[sys.argv[1]]()
    report(right=float("it is 3" in final))
