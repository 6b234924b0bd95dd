"""Multi-turn, every turn counting towards the reward: find a number from the answers "higher" and "lower"."""

from lachesis import Environment, Reply, Session, Task


class Guessing(Environment):
    def __len__(self) -> int:
        return 100

    def task(self, index: int) -> Task:
        return Task(item=str(index), prompt="Guess my number, 0 to 99.", task={"answer": index})

    def respond(self, task: Task, session: Session, reply: Reply) -> list[str]:
        if not reply.text.isdecimal():
            return ["A number, please."]
        guess, secret = int(reply.text), task.task["answer"]
        return [] if guess == secret else ["higher" if guess < secret else "lower"]

    def reward(self, task: Task, session: Session) -> float:
        right = str(task.task["answer"])
        return sum(float(reply.text == right) - 0.1 for reply in session.replies)
