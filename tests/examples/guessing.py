"""Multi-turn with a reward for each turn: find a number from the answers "higher" and "lower"."""

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

    def turn_reward(self, task: Task, session: Session, reply: Reply) -> float:
        return float(reply.text == str(task.task["answer"])) - 0.1

    def reward(self, task: Task, session: Session) -> float:
        return sum(session.turn_rewards)
