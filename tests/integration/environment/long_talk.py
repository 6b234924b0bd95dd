"""An agent of many short turns with a tool; each turn and each run of the tool is noted in a file of the test."""

import json
import os
import time
from pathlib import Path

from lachesis import Environment, Session, Task
from lachesis.pipeline.environment.tools import run_tools, tool
from lachesis.pipeline.tasks.tool_calls import ParsedCalls
from lachesis.schemas.rollout import ToolCall

TURNS = 12


class LongTalk(Environment):
    max_turns = TURNS

    def __init__(self, notes: str) -> None:
        self.notes = Path(notes)

    def __len__(self) -> int:
        return 100_000

    def task(self, index: int) -> Task:
        return Task(item=f"{index}", prompt=f"Begin {index}")

    def note(self, **what: object) -> None:
        with self.notes.open("ab", buffering=0) as file:
            file.write(json.dumps({"pid": os.getpid(), "s": time.time(), **what}).encode() + b"\n")

    @tool
    def ring(self, bell: str) -> str:
        self.note(rang=bell)
        return f"rang {bell}"

    async def rollout(self, task: Task, session: Session) -> None:
        for turn in range(TURNS):
            place = {"item": task.item, "sample": session.sample, "turn": turn}
            self.note(begin=place)
            reply = await session.generate()
            self.note(end=place, text=reply.text)
            call = ToolCall(
                name="ring", arguments=json.dumps({"bell": f"{task.item} {session.sample} {turn} {reply.text}"})
            )
            said = await run_tools(self.tools, ParsedCalls([call], []), self.tool_timeout_s, session.tool_record)
            session.add(f"Go on {turn}", *[message.content[:8] for message in said])

    def reward(self, task: Task, session: Session) -> float:
        return float(len(session.text) % 3)
