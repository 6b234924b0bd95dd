"""Recorded sequences are, token by token and logprob by logprob, what the engine sampled, whatever the agent does."""

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from unit.extensions.endpoint.engine import ScriptedEngine
from unit.extensions.endpoint.families import FAMILIES, PUBLISHED, call_text

from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.inference_requests import InferenceRequests
from lachesis.pipeline.environment.session import Session, SharedFirstTurn
from lachesis.pipeline.errors import EnvironmentCodeError, PromptTooLongError
from lachesis.pipeline.extensions.endpoint.agent_session import AgentSession, SessionEndedError
from lachesis.pipeline.extensions.endpoint.logic.dialects import DIALECTS
from lachesis.pipeline.extensions.endpoint.rendering import PromptRenderer
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.errors import DataError

CHAT = DIALECTS["/v1/chat/completions"]
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


def recorded(engine: Any, *, max_context: int | None = None, max_calls: int = 1000) -> AgentSession:
    requests = InferenceRequests(engine, CollectConfig(max_context=max_context))
    sampling = SamplingParams(max_tokens=200)
    task = Task(item="x", prompt="?")
    opening = SharedFirstTurn(requests, task.messages, [0], sampling)
    session = Session(task, 0, opening=opening, requests=requests, sampling=sampling, max_turns=1)
    return AgentSession(session, PromptRenderer(), max_calls=max_calls)


async def chat(session: AgentSession, messages: list[dict[str, Any]], *, retry: bool = False, **more: Any) -> Any:
    """Return the first answer's message, as an agent gets it."""
    request = CHAT.read({"model": "m", "messages": messages, **more})
    found = await session.answer(request, is_retry=retry)
    found.is_delivered = True
    return CHAT.answer(request, found.answer)["choices"][0]["message"]


def check_against_engine(session: AgentSession, engine: ScriptedEngine) -> None:
    """Each call's sequence is the prompt and the tokens of one request to the engine, with the engine's logprobs."""
    known = {(tuple(one.prompt), tuple(one.tokens), tuple(one.logprobs)) for one in engine.sampled}
    assert len(session.tree.calls) == len(engine.sampled)
    for call in session.tree.calls:
        whole, size = session.tree.tokens(call.index), len(call.sampled.token_ids)
        assert (tuple(whole[:-size]), tuple(whole[-size:]), tuple(call.sampled.logprobs)) in known
        if call.parent is not None:
            before = session.tree.tokens(call.parent)
            assert whole[: len(before)] == before


def check_each_call_is_trained_once(session: AgentSession) -> None:
    """Each answer that the agent got is trained in exactly one of the sequences, all of which are whole paths."""
    paths, sequences = session.tree.trained_paths(), session.session.sequences
    assert [one.tokens for one in sequences] == [session.tree.tokens(path[-1].index) for path in paths]
    trained: list[tuple[int, float]] = []
    for one in sequences:
        assert any(one.loss_mask)
        trained += [pair for pair, mask in zip(zip(one.tokens, one.logprobs, strict=True), one.loss_mask) if mask]  # noqa: B905
        assert not any(value for value, mask in zip(one.logprobs, one.loss_mask, strict=True) if not mask)
    wanted = {call.index: call.sampled for path in paths for call in path}
    sampled = [pair for one in wanted.values() for pair in zip(one.token_ids, one.logprobs, strict=True)]
    assert sorted(trained) == sorted(sampled)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "call", "call", "rewrite", "compact", "sub-agent", "retry", "two"]),
        st.text(alphabet="ab {}\n<>é", min_size=1, max_size=8).filter(str.strip),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *PUBLISHED])
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
@given(actions=ACTIONS, seed=st.integers(0, 1 << 16))
async def test_whatever_the_agent_does_what_is_recorded_is_what_was_sampled(
    family: str, actions: list[tuple[str, str]], seed: int
) -> None:
    engine = ScriptedEngine(family, seed)
    session = recorded(engine)
    history: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    engine.texts = ["well"]
    history.append(await chat(session, history, tools=[TOOL]))
    n = 1
    for action, text in actions:
        if action not in {"retry", "sub-agent"}:
            n = 2 if action == "two" else 1
        match action:
            case "ask" | "two":
                engine.texts = [f"{text} is it", "other"]
                history.append({"role": "user", "content": text})
                history.append(await chat(session, history, tools=[TOOL], n=n))
            case "call":
                arguments = json.dumps({"a": text})
                engine.texts = [call_text(family, "add", arguments), f"so {text}"]
                history.append({"role": "user", "content": "add"})
                history.append(await chat(session, history, tools=[TOOL]))
                (call,) = history[-1]["tool_calls"]
                assert json.loads(call["function"]["arguments"]) == {"a": text}
                history.append({"role": "tool", "content": text, "tool_call_id": call["id"]})
                parent = len(session.tree.calls) - 1
                history.append(await chat(session, history, tools=[TOOL]))
                assert session.tree.calls[-1].parent == parent  # the result of a tool goes on from its call
            case "rewrite":
                place = max(at for at, one in enumerate(history) if one["role"] == "user")
                history = [*history[:place], {"role": "user", "content": f"no, {text}"}]
                history.append(await chat(session, history, tools=[TOOL]))
            case "compact":
                history = [{"role": "user", "content": f"so far: {text}"}]
                history.append(await chat(session, history, tools=[TOOL]))
            case "sub-agent":
                await chat(session, [{"role": "user", "content": f"you are a helper: {text}"}])
            case "retry":
                made = len(engine.sampled)
                assert await chat(session, history[:-1], retry=True, tools=[TOOL], n=n) == history[-1]
                assert len(engine.sampled) == made
    check_against_engine(session, engine)
    session.fill()
    check_each_call_is_trained_once(session)
    own = [token for token, mask in zip(session.session.tokens, session.session.loss_mask, strict=True) if mask]
    most = max(sum(len(call.sampled.token_ids) for call in path) for path in session.tree.paths())
    assert len(own) == most  # the sequence that is scored trains all its sampled tokens
    session.fill("longest")
    assert session.session.sequences == [session.session]


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_conversation_that_is_not_rewritten_is_one_sequence_and_no_text_is_tokenized_again(family: str) -> None:
    engine = ScriptedEngine(family)
    session = recorded(engine)
    history: list[dict[str, Any]] = [{"role": "system", "content": "be short"}]
    for turn in range(6):
        engine.texts = [f"the answer is {turn}"]
        history.append({"role": "user", "content": f"question {turn}"})
        history.append(await chat(session, history))
    assert [call.parent for call in session.tree.calls] == [None, 0, 1, 2, 3, 4]
    assert len(list(session.tree.paths())) == 1
    check_against_engine(session, engine)


@pytest.mark.parametrize("family", ["qwen", "llama"])
async def test_recorded_tokens_read_as_the_template_writes_the_conversation(family: str) -> None:
    engine = ScriptedEngine(family)
    session = recorded(engine)
    history: list[dict[str, Any]] = []
    for turn in range(3):
        engine.texts = [f"the answer is {turn}"]
        history.append({"role": "user", "content": f"question {turn}"})
        history.append(await chat(session, history))
    plain = [{"role": one["role"], "content": one["content"]} for one in history]
    whole = await engine.tokenize(plain, add_generation_prompt=False)
    tokens = session.tree.tokens(2)
    assert engine.tokenizer.decode(whole).startswith(engine.tokenizer.decode(tokens))


FORM = {"response_format": {"type": "json_object"}}


async def test_a_constrained_answer_is_recorded_and_not_trained() -> None:
    """Its logprobs are those of what was allowed, which the trainer does not compute."""
    engine = ScriptedEngine("qwen")
    session = recorded(engine)
    engine.texts = ["free", '{"a": 1}', "free again", '{"b": 2}']
    history: list[dict[str, Any]] = []
    for form in ({}, FORM, {}):
        history.append({"role": "user", "content": "?"})
        history.append(await chat(session, history, **form))
    await chat(session, [*history[:2], {"role": "user", "content": "a fork of which nothing is free"}], **FORM)
    check_against_engine(session, engine)
    session.fill()
    assert session.session.sequences == [session.session]
    assert session.session.notes["calls"] == {"all": 4, "trained": 2, "constrained": 2}
    trained = [token for token, mask in zip(session.session.tokens, session.session.loss_mask, strict=True) if mask]
    assert trained == [*engine.sampled[0].tokens, *engine.sampled[2].tokens]
    assert session.session.tokens == session.tree.tokens(2)


async def test_a_sample_of_constrained_answers_alone_says_that_there_is_nothing_to_train() -> None:
    session = recorded(ScriptedEngine("qwen"))
    await chat(session, [{"role": "user", "content": "?"}], **FORM)
    with pytest.raises(EnvironmentCodeError, match="constrained by response_format"):
        session.fill()


async def test_the_same_request_twice_is_two_answers_and_a_retry_is_one() -> None:
    engine = ScriptedEngine("qwen")
    session, ask = recorded(engine), [{"role": "user", "content": "?"}]
    engine.texts = ["one", "two"]
    assert (await chat(session, ask))["content"] == "one"
    assert (await chat(session, ask))["content"] == "two"
    assert (await chat(session, ask, retry=True))["content"] == "two"
    assert len(engine.sampled) == 2


async def test_an_answer_that_never_arrived_is_given_again_and_not_trained_if_nobody_comes_back() -> None:
    engine = ScriptedEngine("qwen")
    session = recorded(engine)
    engine.texts = ["first", "a far longer answer that nobody has read", "second"]
    ask = [{"role": "user", "content": "?"}]
    first = await chat(session, ask)
    lost = CHAT.read({"messages": [*ask, first, {"role": "user", "content": "more"}], "model": "m"})
    answer = await session.answer(lost)
    assert not answer.is_delivered
    assert [[call.message.content for call in path] for path in session.tree.trained_paths()] == [["first"]]
    assert await session.answer(lost) is answer  # it is requested again, without any sign of a retry
    assert len(engine.sampled) == 2


async def test_thinking_that_is_dropped_forks_and_thinking_that_comes_back_goes_on() -> None:
    engine, anthropic = ScriptedEngine("qwen"), DIALECTS["/v1/messages"]
    session = recorded(engine)
    engine.texts = ["<think>hm</think>\n\nyes", "again", "and again"]
    ask = [{"role": "user", "content": "?"}]
    request = anthropic.read({"model": "m", "max_tokens": 50, "messages": ask})
    blocks = anthropic.answer(request, (await session.answer(request)).answer)["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert blocks[1]["text"] == "yes"
    for sent, parent in ((blocks, 0), (blocks[1:], None)):
        further = [*ask, {"role": "assistant", "content": sent}, {"role": "user", "content": "sure?"}]
        await session.answer(anthropic.read({"model": "m", "max_tokens": 50, "messages": further}))
        assert session.tree.calls[-1].parent == parent
    check_against_engine(session, engine)


async def test_a_template_without_tools_has_them_named_in_the_system_message() -> None:
    engine = ScriptedEngine("qwen")
    engine.tokenizer = type(engine.tokenizer)(
        tokenizer_object=engine.tokenizer.backend_tokenizer, eos_token="<|im_end|>"
    )
    engine.tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    session = recorded(engine)
    engine.texts = [call_text("qwen", "add", '{"a": 1}'), "three"]
    history: list[dict[str, Any]] = [{"role": "system", "content": "be short"}, {"role": "user", "content": "?"}]
    history.append(await chat(session, history, tools=[TOOL]))
    assert history[-1]["tool_calls"][0]["function"]["name"] == "add"
    assert '"name":"add"' in engine.tokenizer.decode(engine.sampled[0].prompt)
    history.append({"role": "tool", "content": "3", "tool_call_id": history[-1]["tool_calls"][0]["id"]})
    await chat(session, history, tools=[TOOL])
    assert session.tree.calls[-1].parent == 0
    check_against_engine(session, engine)


async def test_a_prompt_beyond_the_context_is_refused_and_the_session_goes_on() -> None:
    session = recorded(ScriptedEngine("qwen"), max_context=60)
    with pytest.raises(PromptTooLongError, match="prompt is too long"):
        await chat(session, [{"role": "user", "content": "x" * 500}])
    assert (await chat(session, [{"role": "user", "content": "x"}]))["content"] == "done"


async def test_more_calls_than_a_session_may_make_are_refused() -> None:
    session = recorded(ScriptedEngine("qwen"), max_calls=2)
    ask = [{"role": "user", "content": "?"}]
    await chat(session, ask, n=2)
    with pytest.raises(SessionEndedError, match="2 calls"):
        await chat(session, ask)
    assert await chat(session, ask, n=2, retry=True)


async def test_a_reward_ends_the_session_and_another_one_is_refused() -> None:
    session = recorded(ScriptedEngine("qwen"))
    await chat(session, [{"role": "user", "content": "?"}])
    assert session.rewards is None
    session.report({"a": 0.0, "b": None})
    session.report({"a": 0.0, "b": None})
    with pytest.raises(SessionEndedError, match="another reward"):
        session.report({"a": 1.0})
    with pytest.raises(SessionEndedError, match="has ended"):
        await chat(session, [{"role": "user", "content": "more"}])


async def test_a_session_without_an_answer_makes_no_sample() -> None:
    with pytest.raises(EnvironmentCodeError, match="no answer of the model"):
        recorded(ScriptedEngine("qwen")).fill()


async def test_responses_follow_the_answer_that_they_name() -> None:
    engine, responses = ScriptedEngine("qwen"), DIALECTS["/v1/responses"]
    session = recorded(engine)
    first = responses.read({"model": "m", "input": "?", "instructions": "be short"})
    named = responses.answer(first, (await session.answer(first)).answer)["id"]
    second = responses.read({"model": "m", "input": "more", "instructions": "be short", "previous_response_id": named})
    await session.answer(second)
    assert session.tree.calls[1].parent == 0
    with pytest.raises(DataError, match="previous_response_id"):
        await session.answer(responses.read({"model": "m", "input": "more", "previous_response_id": "resp_x"}))


async def test_calls_in_a_history_that_the_template_would_drop_are_in_the_text() -> None:
    """An agent that shows by examples how to call, to a model whose template knows no tools."""
    engine = ScriptedEngine("qwen")
    engine.tokenizer = copy.deepcopy(engine.tokenizer)
    engine.tokenizer.chat_template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    session = recorded(engine)
    shown = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    history = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "so", "tool_calls": [shown]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "user", "content": "and?"},
    ]
    answer = await chat(session, history, tools=[TOOL])
    prompt = engine.tokenizer.decode(engine.sampled[0].prompt)
    assert 'assistant\nso\n<tool_call>{"name": "add", "arguments": {"a":1}}</tool_call><|im_end|>' in prompt
    await chat(session, [*history, answer, {"role": "user", "content": "on"}], tools=[TOOL])
    assert [call.parent for call in session.tree.calls] == [None, 0]
    check_against_engine(session, engine)
