"""A turn that its environment stops waiting for leaves nothing: the next one begins where it began."""

from typing import Any

import anyio
import pytest
from unit.environment.one_task import OneTask

from lachesis import Session, Task
from lachesis.pipeline.calls.recorded import RecordedGroup
from lachesis.pipeline.environment.rollout import collect_group
from lachesis.pipeline.environment.session_calls import CallFigures, GroupCalls
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.calls import GroupStart, SessionCall, SessionEnd
from lachesis.testing import FakeInference


class Impatient(OneTask):
    """Waits for its second turn in a scope that may be cancelled, and asks again where it was."""

    max_turns = 3
    scope: anyio.CancelScope | None = None

    async def rollout(self, task: Task, session: Session) -> None:
        await session.generate()
        session.add("on")
        replies = len(session.replies)
        with anyio.CancelScope() as self.scope:
            await session.generate()
        self.scope = None
        if len(session.replies) == replies:
            await session.generate()
        session.add("and on")
        await session.generate()


class Interrupted(FakeInference):
    """Cancels the environment's scope in the middle of the operation number `at` in it."""

    def __init__(self, env: Impatient, at: int | None) -> None:
        super().__init__(lambda prompt, _: f"<tool_call>{prompt.count('<assistant>')}")
        self.env, self.at, self.operations = env, at, 0

    async def _interrupt(self) -> None:
        if self.env.scope is not None:
            self.operations += 1
            if self.operations == self.at:
                self.env.scope.cancel()
        await anyio.lowlevel.checkpoint()

    async def tokenize(self, messages: Any, **more: Any) -> list[int]:
        await self._interrupt()
        return await super().tokenize(messages, **more)

    async def detokenize(self, token_ids: Any) -> str:
        await self._interrupt()
        return await super().detokenize(token_ids)

    async def generate(self, prompt_ids: Any, n: int, sampling: SamplingParams | None = None) -> Any:
        await self._interrupt()
        return await super().generate(prompt_ids, n, sampling)


class Log:
    """Stands for the recorder of a group; the server's answer can be interrupted, too, once it has the record."""

    group, life = "0" * 32, 0

    def __init__(self, inference: Interrupted, records: list[Any]) -> None:
        named: dict[str, Any] = {
            "run": "r",
            "env": "e",
            "holder": "h",
            "producer": "p",
            "tokenizer_hash": "t",
            "item": "x",
        }
        counts: dict[str, Any] = {"life": 0, "epoch": 1, "counter": 1, "samples": 1, "started_ns": 1}
        start = GroupStart(group=self.group, **named, **counts)
        self.known = RecordedGroup(start)
        self.inference, self.records = inference, records
        for record in records:
            self._keep(record)

    def _keep(self, record: Any) -> None:
        if isinstance(record, SessionCall):
            self.known.session(record.session).calls[record.index] = record
        elif isinstance(record, SessionEnd):
            self.known.session(record.session).end = record

    async def store(self, record: Any) -> None:
        self.records.append(record)
        self._keep(record)
        await self.inference._interrupt()


async def collected(at: int | None, records: list[Any] | None, *, again: bool = False) -> tuple[Any, int]:
    """Return what the one sample is trained on, and the operations in the scope."""
    env = Impatient()
    inference = Interrupted(env, at)
    calls = None
    if records is not None:
        calls = GroupCalls(Log(inference, records), CallFigures())  # type: ignore[arg-type]
    made = await collect_group(env, env.task(0), inference, 1, SamplingParams(seed=3), group="0" * 32, calls=calls)
    (session,) = made.sessions
    if again:
        assert not inference.requests, "what is recorded is not sampled again"
    assert at is None or inference.operations >= at
    return (session.tokens, session.loss_mask, session.logprobs, session.replies, session.spans), inference.operations


@pytest.mark.parametrize("is_recorded", [False, True])
async def test_the_same_sequence_wherever_it_was_cancelled(is_recorded: bool) -> None:
    whole, operations = await collected(None, [] if is_recorded else None)
    assert operations >= 4 + is_recorded
    for at in range(1, operations + 1):
        records: list[Any] = []
        assert (await collected(at, records if is_recorded else None))[0] == whole, f"cancelled in operation {at}"
        if is_recorded:
            resumed = [one for one in records if not isinstance(one, SessionEnd)]
            assert (await collected(None, resumed, again=True))[0] == whole, f"resumed after {at}"
