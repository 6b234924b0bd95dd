"""After a kill an agent starts again, and each request that it repeats gets the answer that the log holds."""

import contextlib
from typing import Any

import pytest
from unit.extensions.endpoint.engine import ScriptedEngine
from unit.extensions.endpoint.families import FAMILIES, call_text
from unit.extensions.endpoint.test_recording import TOOL, chat, check_against_engine, check_each_call_is_trained_once

from lachesis.pipeline.calls.recorded import RecordedGroup
from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.inference_requests import InferenceRequests
from lachesis.pipeline.environment.session import Session, SharedFirstTurn
from lachesis.pipeline.environment.session_calls import CallFigures, Diverging, GroupCalls
from lachesis.pipeline.errors import NotResumableError
from lachesis.pipeline.extensions.endpoint.agent_session import AgentSession
from lachesis.pipeline.extensions.endpoint.rendering import PromptRenderer
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.calls import SessionCall, SessionEnd
from lachesis.schemas.codec import decode, encode


class KilledError(Exception):
    """Raised where the process is killed."""


class LogOfGroup:
    """The log of one group, in place of the broker's: what is stored passes through the wire's form and checks."""

    group, life = "0" * 32, 1

    def __init__(self) -> None:
        self.is_taken_up = False
        self.known = RecordedGroup(None, {})  # type: ignore[arg-type]  # its start is not read here

    async def check_held(self) -> None:
        """No other process takes it up."""

    async def store(self, record: SessionCall | SessionEnd) -> None:
        found = decode(type(record), encode(record))
        found.check()
        if isinstance(found, SessionEnd):
            self.known.session(found.session).end = found
        else:
            self.known.session(found.session).calls[found.index] = found


def session_on(log: LogOfGroup, engine: ScriptedEngine, diverging: Diverging = "sample") -> AgentSession:
    requests, sampling = InferenceRequests(engine, CollectConfig()), SamplingParams(max_tokens=200)
    task = Task(item="x", prompt="?")
    opening = SharedFirstTurn(requests, task.messages, [0], sampling)
    calls = GroupCalls(log, CallFigures(), diverging).open(0)  # type: ignore[arg-type]
    session = Session(task, 0, opening=opening, requests=requests, sampling=sampling, max_turns=1, calls=calls)
    return AgentSession(session, PromptRenderer(), max_calls=100)


async def agent(session: AgentSession, engine: ScriptedEngine, family: str, *, killed_after: int = 99) -> list[Any]:
    """Hold a conversation with a tool, a sub-agent and a compaction; it ends in a kill after so many calls."""
    answers: list[Any] = []

    async def ask(history: list[dict[str, Any]], text: str, **more: Any) -> Any:
        if len(answers) == killed_after:
            raise KilledError
        engine.texts = [text, "other"]
        answers.append(await chat(session, history, **more))
        return answers[-1]

    history: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    history.append(await ask(history, call_text(family, "add", '{"a": 1}'), tools=[TOOL]))
    history.append({"role": "tool", "content": "3", "tool_call_id": history[-1]["tool_calls"][0]["id"]})
    history.append(await ask(history, "it is 3", tools=[TOOL]))
    await ask([{"role": "user", "content": "you help"}], "so I do", n=2)
    history = [{"role": "user", "content": f"so far: {history[-1]['content']}"}]
    history.append(await ask(history, "very well", tools=[TOOL]))
    history.append({"role": "user", "content": "more"})
    await ask(history, "this is by far the longest answer " * 5, tools=[TOOL])
    return answers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("calls", range(6))
async def test_an_agent_that_was_killed_gets_its_answers_again_and_the_rest_is_sampled(family: str, calls: int) -> None:
    log, engine = LogOfGroup(), ScriptedEngine(family, 1)
    before: list[Any] = []
    with contextlib.suppress(KilledError):
        before = await agent(session_on(log, engine), engine, family, killed_after=calls)
    stored = len(engine.sampled)
    session = session_on(log, engine)
    whole = await agent(session, engine, family)
    assert len(whole) == 5
    assert len(engine.sampled) == 6  # the requests of both lives together: one of the five is for two answers
    assert stored == min(calls, 5) + (calls > 2)
    check_against_engine(session, engine)
    session.fill()
    assert session.session.diverged is None
    assert [call.index for call in log.known.session("0.0").path(5)] == [4, 5]
    assert session.session.tokens == session.tree.tokens(5)
    check_each_call_is_trained_once(session)
    assert len(session.session.sequences) == 4  # before the compaction, both answers of the sub-agent, and after it
    assert before in ([], whole)


async def test_a_finished_sample_has_the_same_sequences_after_a_kill() -> None:
    log, engine = LogOfGroup(), ScriptedEngine("qwen", 1)
    session = session_on(log, engine)
    history: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    history.append(await chat(session, history))
    for text in ("one way", "and a longer other way"):  # they have the first answer in common
        engine.texts = [text]
        await chat(session, [*history, {"role": "user", "content": text}])
    await chat(session, [*history, {"role": "user", "content": "in a form"}], response_format={"type": "json_object"})
    engine.texts = ["and a free answer after it, the longest of all " * 5]
    form = [*history, {"role": "user", "content": "in a form"}, {"role": "assistant", "content": "done"}]
    await chat(session, [*form, {"role": "user", "content": "and?"}])
    await agent(session, engine, "qwen")
    session.fill()
    assert session.session.notes["calls"]["constrained"] == 1
    await session.session.end({"right": 1.0})
    calls = GroupCalls(log, CallFigures())  # type: ignore[arg-type]
    end = calls.finished(0)
    assert end is not None
    after = session_on(log, engine).session
    after.restore(*end)
    assert len(after.sequences) == 7
    for one, other in zip(after.sequences, session.session.sequences, strict=True):
        assert (one.tokens, one.loss_mask, one.versions) == (other.tokens, other.loss_mask, other.versions)
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
    assert calls.figures.resumed_calls == 11  # each once


@pytest.mark.parametrize("diverging", ["sample", "give_up"])
async def test_an_agent_that_asks_something_else_is_named_and_given_up_if_the_run_wants_that(
    diverging: Diverging,
) -> None:
    """One conversation is given up before anything else of it is sampled."""
    log, engine = LogOfGroup(), ScriptedEngine("qwen")
    history = [{"role": "user", "content": "one"}]
    before = session_on(log, engine)
    history += [await chat(before, history), {"role": "user", "content": "two"}]
    await chat(before, history)
    session = session_on(log, engine, diverging)
    await chat(session, history[:1])
    other = [*history[:2], {"role": "user", "content": "another"}]
    if diverging == "give_up":
        with pytest.raises(NotResumableError, match="request 1 was another one, which ends with user: 'another'"):
            await chat(session, other)
        assert isinstance(session.session.failure, NotResumableError)
        assert session.ended.is_set()
        assert len(engine.sampled) == 2
    else:
        await chat(session, other)
        session.fill()
        assert str(session.session.diverged).startswith("1 recorded calls of sample 0 were not requested again")
    assert "request 1 was another one, which ends with user: 'another'" in str(session.session.diverged)


@pytest.mark.parametrize("diverging", ["sample", "give_up"])
async def test_conversations_side_by_side_may_go_on_in_another_order(diverging: Diverging) -> None:
    log, engine = LogOfGroup(), ScriptedEngine("qwen")
    before = session_on(log, engine)
    histories = [[{"role": "user", "content": name}] for name in ("one", "two")]
    for history in histories:
        history += [await chat(before, history), {"role": "user", "content": "more"}]
    session = session_on(log, engine, diverging)
    await chat(session, histories[0][:1])
    await chat(session, histories[0])
    await chat(session, histories[1][:1])
    session.fill()
    assert session.session.diverged is None


async def test_a_sample_that_requests_less_than_was_recorded_says_so() -> None:
    log, engine = LogOfGroup(), ScriptedEngine("qwen")
    before, ask = session_on(log, engine), [{"role": "user", "content": "one"}]
    await chat(before, [*ask, await chat(before, ask), {"role": "user", "content": "two"}])
    session = session_on(log, engine)
    await chat(session, ask)
    session.fill()
    assert str(session.session.diverged).endswith("not requested again after a kill; nothing else was")
