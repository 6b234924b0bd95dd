"""An environment and a rater that misbehave while a file of that name lies in the folder `STANDSTILL_SWITCHES`."""

import ctypes
import math
import os
import sys
import time
from pathlib import Path

import anyio.to_thread

from lachesis import Environment, Sample, Session, Task, rater

_FOLDER = Path(os.environ.get("STANDSTILL_SWITCHES", "."))


def is_on(name: str) -> bool:
    return (_FOLDER / name).exists()


def wait_while_on(name: str) -> None:
    while is_on(name):
        time.sleep(0.1)


class Switched(Environment):
    """Two numbers to add; see the module's docstring."""

    def __len__(self) -> int:
        return 10_000

    def task(self, index: int) -> Task:
        if is_on("task raises"):
            raise KeyError("no such column: question")
        if is_on("process ends"):
            os._exit(1)
        wait_while_on("task hangs")
        a, b = divmod(index, 100)
        prompt = f"What is {a}+{b}?" * (100 if is_on("prompts are long") else 1)
        return Task(item=f"{a}+{b}", prompt=prompt, task={"answer": str(a + b)})

    async def rollout(self, task: Task, session: Session) -> None:
        if is_on("rollout exits"):
            sys.exit(8)
        if is_on("rollout hangs"):
            await anyio.to_thread.run_sync(wait_while_on, "rollout hangs")
        await super().rollout(task, session)

    def reward(self, task: Task, session: Session) -> float:
        return float(session.text.strip() == task.task["answer"])


@rater(bounds=(0.0, 1.0))
def letters(sample: Sample) -> float:
    """Return the share of letters among the characters, unless a switch is on."""
    if is_on("rater raises"):
        raise KeyError("answer")
    if is_on("rater exits"):
        os._exit(3)
    if is_on("rater is nan"):
        return math.nan
    wait_while_on("rater hangs")
    if is_on("rater holds Python"):
        ctypes.PyDLL(None).usleep(900_000 * 15)
    if is_on("rewards are equal"):
        return 0.5
    text = sample.completion
    return sum(character.isalpha() for character in text) / max(len(text), 1)
