"""The base of environments with a single task, which is worth nothing, for tests of how sessions behave."""

from lachesis import Environment, Session, Task

__all__ = ["OneTask"]


class OneTask(Environment):
    """One task."""

    def __len__(self) -> int:
        return 1

    def task(self, index: int) -> Task:
        return Task(item="x", prompt="?")

    def reward(self, task: Task, session: Session) -> float:
        return 0.0
