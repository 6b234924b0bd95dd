"""An agent as a stranger writes one: a loop with two tools, over plain HTTP. It imports nothing of this project.

With `--team` it tries its last step twice, has a sub-agent, and goes on from a summary of its conversation. With
`--later FOLDER` its reward is left there, with the address of its session, for a judge elsewhere.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
    for name, text in (("add", "Return a + b."), ("multiply", "Return a * b."))
]


def post(url: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return json.load(answer)


def ask(messages: list, **more: object) -> dict:
    body = {"model": "policy", "messages": messages, **more}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]


def run_tool(name: str, a: int, b: int) -> int:
    return a + b if name == "add" else a * b


def main() -> None:
    task = json.loads(Path(os.environ["LACHESIS_TASK"]).read_text())
    messages = list(task["messages"])
    for _ in range(8):
        message = ask(messages, tools=TOOLS)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            result = run_tool(call["function"]["name"], **json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "content": str(result), "tool_call_id": call["id"]})
    if "--team" in sys.argv:
        for way in ("shorter", "longer"):
            ask([*messages, {"role": "user", "content": f"Say it {way}."}], tools=TOOLS)
        helper = ask([{"role": "user", "content": "Help. Say a letter."}])
        message = ask([{"role": "user", "content": f"So far: {helper['content']}"}])
    print("the agent said", message["content"])
    if "--reward" in sys.argv:
        right = task["task"]["answer"] in (message["content"] or "")
        url, report = os.environ["LACHESIS_SESSION_URL"] + "/reward", {"rewards": {"right": float(right)}}
        if "--later" not in sys.argv:
            post(url, report)
            return
        letter = Path(sys.argv[sys.argv.index("--later") + 1], f"{url.split('/')[-2]}.json")
        partial = letter.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps([url, report]))
        partial.rename(letter)


main()
