"""An agent as a stranger writes one: a loop with one tool over plain HTTP. It imports nothing of this project.

It is to spell a word backward, may call its tool `reverse`, and reports whether its last answer was right. It
notes its requests and answers in the file that `NOTES` names, if any: one JSON line each.
"""

import hashlib
import http.client
import json
import os
import time
from urllib.parse import urlsplit

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "reverse",
            "description": "Return a text backward.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    }
]
MAX_TURNS = 4
ATTEMPTS = 60
PAUSE_S = 0.5
"""Before a request is sent again whose answer did not come."""


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib takes long to load
        return int(file.read().rpartition(b") ")[2].split()[1])


PARENTS = [os.getppid(), parent_of(os.getppid())] if "NOTES" in os.environ else []
"""The process that started this one, which may be a launcher, and the one that started that."""


def note(**fields: object) -> None:
    if "NOTES" in os.environ:
        own = {"pid": os.getpid(), "parents": PARENTS, "key": os.environ["OPENAI_API_KEY"], "s": time.time()}
        line = json.dumps({**own, **fields}) + "\n"
        file = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, line.encode())  # one write: lines of other agents do not get into it
        os.close(file)


def post(url: str, body: dict) -> dict:
    """Return the answer to a request, which is sent again as SDKs do if the server fails or is gone."""
    place = urlsplit(url)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    for retries in range(ATTEMPTS):
        try:
            connection = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
            connection.request("POST", place.path, json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException):
            pass
        else:
            if answer.status == 200:
                return json.loads(text)
            if answer.status < 500:
                raise SystemExit(f"{url} answered {answer.status}: {text.decode()}")
        headers["x-stainless-retry-count"] = str(retries + 1)
        time.sleep(PAUSE_S)
    raise SystemExit(f"{url} did not answer {ATTEMPTS} times")


def ask(messages: list, tools: list = TOOLS) -> dict:
    body = {"model": "policy", "messages": messages, "tools": tools}
    request = hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16]
    note(asked=request)
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    message = answer["choices"][0]["message"]
    note(answered=request, id=answer["id"], text=message["content"])
    return message


def main() -> None:
    with open(os.environ["LACHESIS_TASK"]) as file:  # noqa: PTH123 - pathlib takes longer to import than all of this
        task = json.load(file)
    messages = list(task["messages"])
    for _ in range(MAX_TURNS):
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            result = str(json.loads(call["function"]["arguments"]).get("text", ""))[::-1]
            messages.append({"role": "tool", "content": result, "tool_call_id": call["id"]})
    is_right = (message["content"] or "").strip() == task["task"]["answer"]
    post(os.environ["LACHESIS_SESSION_URL"] + "/reward", {"reward": float(is_right)})


if __name__ == "__main__":
    main()
