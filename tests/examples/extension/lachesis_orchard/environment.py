"""An environment that asks how many apples there are."""

from lachesis import Environment, Session, Task


class Orchard(Environment):
    """Task `i` has `i` apples on each of `trees` trees."""

    def __init__(self, trees: int = 2) -> None:
        self.trees = trees

    def __len__(self) -> int:
        return 100

    def task(self, index: int) -> Task:
        apples = index * self.trees
        return Task(item=str(index), prompt=f"{self.trees} x {index} apples?", task={"answer": str(apples)})

    def reward(self, task: Task, session: Session) -> float:
        return float(session.replies[-1].text == task.task["answer"])
