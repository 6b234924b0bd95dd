"""An agent of somebody else: it knows an address and a token, the official SDK, and nothing of this project.

    python outside_agent.py http://HOST:PORT TOKEN_FILE NOTES

It takes one sample after another, holds a conversation of `TURNS` turns, and reports a reward. Lines of the file NOTES
say what it got of each session: its key with the answers, and again once its report is taken.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from openai import APIStatusError, OpenAI

TURNS = 9
PAUSE_S = 0.3
TIMEOUT_S = 5.0
"""Beyond the endpoints' `hold_s`; one that takes longer hangs, and the other one is tried."""


def post(url: str, token: str, body: object = None) -> Any:
    """Return the answer to a request, which is sent again while the endpoint is away; None: the session is gone."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    while True:
        request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers)  # noqa: S310 - http
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code not in {502, 503}:
                return None
        except (OSError, ValueError):
            pass
        time.sleep(PAUSE_S)


def work(address: str, token: str, notes: Path) -> None:
    """Work on one sample, and write down what it got."""
    started = post(f"{address}/sessions", token)
    if started is None:
        return
    client = OpenAI(base_url=started["openai_base_url"], api_key=started["key"], max_retries=100, timeout=TIMEOUT_S)
    messages = list(started["task"]["messages"])
    answers = []
    for turn in range(TURNS):
        try:
            answer = client.chat.completions.create(model="policy", messages=messages)
        except APIStatusError as error:
            write(notes, {"key": started["key"], "answers": answers, "ended": str(error)})
            return
        answers.append(answer.choices[0].message.content)
        messages += [answer.choices[0].message, {"role": "user", "content": f"And {turn}?"}]
        time.sleep(PAUSE_S)
    write(notes, {"key": started["key"], "answers": answers})
    if post(f"{address}/s/{started['key']}/reward", token, {"reward": len(answers[-1]) % 2}) is not None:
        write(notes, {"key": started["key"], "reported": True})


def write(notes: Path, found: dict[str, Any]) -> None:
    """Add a line to the notes."""
    with notes.open("a") as sink:
        sink.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    to, token_file, notes = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    while not token_file.exists():
        time.sleep(PAUSE_S)
    while True:
        work(to, token_file.read_text().strip(), notes)
