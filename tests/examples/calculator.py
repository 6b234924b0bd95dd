"""Multi-turn with a tool: products too long to do in one's head."""

from lachesis import Environment, Message, Session, Task, tool


class Products(Environment):
    max_turns = 4

    def __len__(self) -> int:
        return 900

    def task(self, index: int) -> Task:
        a, b = 100 + index, 999 - index
        ask = [Message(role="system", content=self.tool_instructions())]
        ask.append(Message(role="user", content=f"What is {a}*{b}?"))
        return Task(item=f"{a}*{b}", prompt=ask, task={"answer": str(a * b)})

    @tool
    async def multiply(self, a: int, b: int) -> int:
        """Return a*b."""
        return a * b

    def reward(self, task: Task, session: Session) -> float:
        return float(session.text.strip() == task.task["answer"])
