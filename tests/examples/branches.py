"""Several answers to one plan: branches of a conversation, each with a reward of its own."""

import anyio

from lachesis import Environment, Session, Task


class Branches(Environment):
    """The model plans once and answers three times; the plan is credited with the mean of its answers."""

    max_turns = 2

    def __len__(self) -> int:
        return 900

    def task(self, index: int) -> Task:
        a, b = 100 + index, 999 - index
        return Task(item=f"{a}*{b}", prompt=f"How would you compute {a}*{b}?", task={"answer": str(a * b)})

    async def rollout(self, task: Task, session: Session) -> None:
        await session.generate()
        rewards = session.state["rewards"] = list[float]()
        branches = [session.fork() for _ in range(3)]
        async with anyio.create_task_group() as tasks:
            for branch in branches:
                tasks.start_soon(self.answer, task, branch, rewards)

    async def answer(self, task: Task, branch: Session, rewards: list[float]) -> None:
        branch.add("Then do it. Say the result alone.")
        reply = await branch.generate()
        rewards.append(float(reply.text.strip() == task.task["answer"]))
        branch.reward_turn(rewards[-1])

    def reward(self, task: Task, session: Session) -> float:
        rewards: list[float] = session.state["rewards"]
        return sum(rewards) / len(rewards)
