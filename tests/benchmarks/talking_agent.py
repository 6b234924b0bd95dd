"""An agent that holds a conversation of many turns, noted as those of `reversing_agent.py`, which lies beside it."""

import json
import os
import time

from reversing_agent import ask, post

TURNS = 40
PAUSE_S = 0.1
"""What an agent does between two calls."""


def main() -> None:
    with open(os.environ["LACHESIS_TASK"]) as file:  # noqa: PTH123 - as in the other agent
        messages = list(json.load(file)["messages"])
    for turn in range(TURNS):
        messages += [ask(messages, tools=[]), {"role": "user", "content": f"And {turn}?"}]
        time.sleep(PAUSE_S)
    post(os.environ["LACHESIS_SESSION_URL"] + "/reward", {"reward": len(messages[-2]["content"] or "") % 2})


if __name__ == "__main__":
    main()
