"""Single-turn: adding two numbers, scored by the environment itself."""

from lachesis import Environment, Session, Task


class Sums(Environment):
    def __init__(self, largest: int = 99) -> None:
        self.numbers = largest + 1

    def __len__(self) -> int:
        return self.numbers**2

    def task(self, index: int) -> Task:
        a, b = divmod(index, self.numbers)
        return Task(
            item=f"{a}+{b}",
            prompt=f"What is {a}+{b}?",
            task={"answer": str(a + b)},
            difficulty=float(len(f"{a}{b}")),
        )

    def reward(self, task: Task, session: Session) -> float:
        return float(session.text.strip() == task.task["answer"])
