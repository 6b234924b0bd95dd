"""An environment and a rater that misbehave while a file of that name lies in the folder `STANDSTILL_SWITCHES`."""

import os
import time
from pathlib import Path

from lachesis import Environment, Sample, Session, Task, rater

_FOLDER = Path(os.environ.get("STANDSTILL_SWITCHES", "."))


def is_on(name: str) -> bool:
    return (_FOLDER / name).exists()


class Switched(Environment):
    """Two numbers to add; see the module's docstring."""

    def __len__(self) -> int:
        return 10_000

    def task(self, index: int) -> Task:
        if is_on("task raises"):
            raise KeyError("no such column: question")
        if is_on("process ends"):
            os._exit(1)
        if is_on("task hangs"):
            while is_on("task hangs"):
                time.sleep(0.1)
        a, b = divmod(index, 100)
        return Task(item=f"{a}+{b}", prompt=f"What is {a}+{b}?", task={"answer": str(a + b)})

    def reward(self, task: Task, session: Session) -> float:
        return float(session.text.strip() == task.task["answer"])


@rater(bounds=(0.0, 1.0))
def letters(sample: Sample) -> float:
    """Return the share of letters among the characters, unless a switch is on."""
    if is_on("rater raises"):
        raise KeyError("answer")
    while is_on("rater hangs"):
        time.sleep(0.1)
    if is_on("rewards are equal"):
        return 0.5
    text = sample.completion
    return sum(character.isalpha() for character in text) / max(len(text), 1)
