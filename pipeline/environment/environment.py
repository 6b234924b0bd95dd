"""The environment SDK: the class that environments subclass.

A single-turn environment is `__len__` and `task`, plus `reward` unless raters judge it. A multi-turn one also has
tools, or `respond`, or its own `rollout`. The base class generates; token ids, loss mask, logprobs and version spans
are the session's work. What may fail, and what then happens:

- inference, or a tool that raises InfrastructureError: retried, then the whole group is abandoned; never a reward.
- the model's own mistakes (a malformed tool call, say): answered in words; raise ToolError for yours.
- a kill of the process: where calls are recorded (`environments.NAME.record`), the next process runs `rollout` again,
  and the conversation goes on where it was.
- a bug (any other exception): the sample is left out of its group, with the traceback and its transcript in the
  group's metadata; when fewer than two samples are left, collection raises EnvironmentCodeError. A bug is never a
  reward of zero.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from lachesis.pipeline.common.real_number import finite_number
from lachesis.pipeline.environment.plain_hooks import HOOKS
from lachesis.pipeline.environment.session import Reply, Session
from lachesis.pipeline.environment.tools import describe_tools, run_tools, tools_of
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.tasks.item_keys import Keys, keys_of
from lachesis.pipeline.tasks.task import Task
from lachesis.pipeline.tasks.tool_calls import ParsedCalls
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

__all__ = ["Environment", "Reward", "resolve_awaitable"]

Reward = float | None | Mapping[str, float | None]
"""One finite number, or several by name; None if the reward is unknown. NumPy's and torch's numbers of one element,
`Decimal`, `Fraction` and bool are numbers, too."""


class Environment:
    """A finite pool of tasks and the way a model works on one.

    `reward`, `score` and `respond` may be plain or async. Plain ones must be quick: while one runs, nothing else of the
    process does, and one that takes a second is named (`plain_hooks`).
    One instance serves many samples at a time: keep a sample's state in `session.state`.
    """

    max_turns: int = 8
    """Maximum number of assistant turns of a sample."""
    turn_timeout_s: float = 60.0
    """Seconds `respond` may take; longer counts as infrastructure."""
    tool_timeout_s: float = 10.0
    """Seconds all tools of one turn may take together; longer ones are reported to the model. Below
    `turn_timeout_s`."""
    rollout_timeout_s: float = 900.0
    """Seconds a whole sample may take; longer counts as infrastructure."""
    resumable: bool = True
    """Whether a conversation can go on after its process was killed: `rollout` runs again, recorded answers and results
    of tools are given to it again. False where what it did outside cannot be done again or left undone."""
    success_threshold: float = 1.0
    """A score from here on is a success, for pass rates and the curriculum."""

    doubts: Sequence[str] = ()
    """Doubts about tasks that can still be used: `env test`, `doctor`, `dev` and the start report them."""

    def __len__(self) -> int:
        """Return the number of tasks."""
        raise NotImplementedError(f"{type(self).__name__} must define __len__, the number of its tasks")

    def task(self, index: int) -> Task:
        """Return the task of `index` (0 <= index < len), the same at every call and in every process."""
        raise NotImplementedError(f"{type(self).__name__} must define task(index)")

    def item_keys(self) -> Keys:
        """Return a key of each task, which identifies it in another order and another start of the run."""

        def task(index: int) -> Task:
            try:
                return self.task(index)
            except Exception:  # noqa: BLE001 - a bug of the environment: where the task is worked on, it is named
                return Task(item=f"broken-{index}", prompt=f"broken-{index}")

        return keys_of(map(task, range(len(self))))

    def running(self) -> AbstractAsyncContextManager[None]:
        """Keep what rollouts need, a process or a server say, while the context lasts. Default: nothing.

        It may be entered while it is already kept.
        """
        return nullcontext()

    async def rollout(self, task: Task, session: Session) -> None:
        """Hold one conversation. Override it for a conversation that `respond` cannot express."""
        while True:
            reply = await session.generate()
            if reply.finish_reason != "stop":
                return
            if session.turns_left <= 0:
                if reply.tool_calls:
                    session.finish_reason = "tool"
                return
            messages = await self._timed(await HOOKS.call(self.respond, task, session, reply))
            if not messages:
                return
            session.add(*messages)

    def respond(
        self, task: Task, session: Session, reply: Reply
    ) -> Sequence[Message | str] | Awaitable[Sequence[Message | str]]:
        """Return the messages that answer a turn; none ends the sample. Default: run the called tools."""
        tools = self.tools
        calls = ParsedCalls(reply.tool_calls, reply.tool_errors)
        return run_tools(tools, calls, self.tool_timeout_s, session.tool_record) if tools else []

    def reward(self, task: Task, session: Session) -> Reward | Awaitable[Reward]:
        """Return the finished sample's reward, or several by name; None means that it is unknown.

        Default: raters score the sample.
        """
        return {}

    async def score(self, task: Task, session: Session) -> float | None:
        """Return the sample's score for evaluation. Default: `reward`, which must then be a single number.

        Raises ConfigError if it is not, ValueError if it is no finite number.
        """
        value = await resolve_awaitable(await HOOKS.call(self.reward, task, session))
        if isinstance(value, Mapping):
            if len(value) != 1:
                raise ConfigError(
                    f"{type(self).__name__} has {len(value)} rewards, so evaluation cannot tell success: define "
                    "score(task, session), or give evaluate() a score"
                )
            (value,) = value.values()
        return None if value is None else finite_number(value)

    def begin_evaluation(self) -> str | None:
        """Prepare to be evaluated here, beside the process that makes rollouts. Called before `running`.

        Returns why it cannot be evaluated, and what to do about it; None: it can.
        """
        return None

    @property
    def waits_for(self) -> str | None:
        """Describe what samples wait for beside the model and this code, for a notice; None: for nothing."""
        return None

    @property
    def tools(self) -> dict[str, Callable[..., Any]]:
        """The methods marked with `@tool`, by name."""
        return tools_of(self)

    def tool_instructions(self) -> str:
        """Return the text that describes these tools to a model; put it into a system message."""
        return describe_tools(self.tools)

    async def _timed(self, answer: Sequence[Message | str] | Awaitable[Sequence[Message | str]]) -> Any:
        with HOOKS.move_on_after(self.turn_timeout_s):
            return await resolve_awaitable(answer)
        raise InfrastructureError(f"{type(self).__name__}.respond took longer than {self.turn_timeout_s:g} s")


async def resolve_awaitable(value: Any) -> Any:
    """Return `value`, awaited where it is awaitable: hooks may be plain or async functions."""
    return await value if isinstance(value, Awaitable) else value
