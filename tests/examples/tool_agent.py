"""An agent with a tool, for sums too large to do in one's head. Two solved ones show a small model how to call it."""

import json
import os
from pathlib import Path

import httpx
import openai

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": NUMBERS}}


def solved(a: int, b: int) -> list[dict]:
    call = {"name": "add", "arguments": json.dumps({"a": a, "b": b})}
    return [
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": f"call-{a}", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": f"call-{a}", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]


def add(arguments: str) -> str:
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) + int(given["b"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error!r}"


task = json.loads(Path(os.environ["LACHESIS_TASK"]).read_text())
client = openai.OpenAI()
messages = [*solved(31, 14), *solved(7, 26), *task["messages"]]
for _ in range(3):
    said = client.chat.completions.create(model="policy", messages=messages, tools=[ADD]).choices[0].message
    calls = said.tool_calls or []
    results = [{"role": "tool", "tool_call_id": one.id, "content": add(one.function.arguments)} for one in calls]
    messages += [said, *results]
    if not calls:
        break
reward = float((said.content or "").strip() == task["task"]["answer"])
httpx.post(os.environ["LACHESIS_SESSION_URL"] + "/reward", json={"reward": reward}).raise_for_status()
