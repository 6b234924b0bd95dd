"""The three dialects: what they read, what they refuse by name, and answers that come back as they were sent."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.extensions.endpoint.logic.answers import first_stop, read_answer
from lachesis.pipeline.extensions.endpoint.logic.constraints import structured_outputs
from lachesis.pipeline.extensions.endpoint.logic.conversation import (
    AnswerSample,
    ChatMessage,
    ModelAnswer,
    ModelRequest,
    conversation_keys,
)
from lachesis.pipeline.extensions.endpoint.logic.dialects import DIALECTS, responses
from lachesis.pipeline.inference.protocol import StructuredOutputs
from lachesis.pipeline.tasks.thoughts import closes_thought
from lachesis.schemas.errors import DataError
from lachesis.schemas.rollout import ToolCall

CHAT, RESPONSES, ANTHROPIC = (DIALECTS[f"/v1/{name}"] for name in ("chat/completions", "responses", "messages"))
ASK = [{"role": "user", "content": "?"}]
BODIES = {
    CHAT: {"model": "m", "messages": ASK},
    RESPONSES: {"model": "m", "input": "?"},
    ANTHROPIC: {"model": "m", "max_tokens": 9, "messages": ASK},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Add.", "parameters": SCHEMA}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def answered(message: ChatMessage, *, finish_reason: str = "stop", stop: str | None = None) -> ModelAnswer:
    sample = AnswerSample(message=message, finish_reason=finish_reason, stop_sequence=stop, tokens=3)
    return ModelAnswer(id="abc", created_s=1, samples=[sample], prompt_tokens=5)


@pytest.mark.parametrize(
    ("dialect", "field", "value"),
    [
        (CHAT, "response_format", {"type": "grammar"}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        (CHAT, "tool_choice", "required"),
        (CHAT, "tool_choice", {"type": "allowed_tools"}),
        (CHAT, "frequency_penalty", 0.5),
        (CHAT, "logit_bias", {"3": 1}),
        (CHAT, "top_logprobs", 5),
        (CHAT, "unheard_of", 1),
        (RESPONSES, "background", True),
        (RESPONSES, "text", {"format": {"type": "grammar"}}),
        (RESPONSES, "text", {"verbosity": "low"}),
        (RESPONSES, "tool_choice", "required"),
        (RESPONSES, "conversation", "c"),
        (RESPONSES, "truncation", "auto"),
        (ANTHROPIC, "top_k", 5),
        (ANTHROPIC, "tool_choice", {"type": "any"}),
        (ANTHROPIC, "tool_choice", {"type": "tool"}),
        (ANTHROPIC, "container", "c"),
        (CHAT, "stream_options", {"unheard_of": True}),
        (RESPONSES, "include", ["unheard_of"]),
    ],
)
def test_what_would_change_the_answer_and_is_not_served_is_refused_by_name(
    dialect: Any, field: str, value: Any
) -> None:
    with pytest.raises(DataError, match=field):
        dialect.read({**BODIES[dialect], field: value})
    assert dialect.read({**BODIES[dialect], field: None}) == dialect.read(BODIES[dialect])


@pytest.mark.parametrize(
    ("dialect", "more"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}),
        (CHAT, {"messages": [{"role": "user", "content": None}]}),
        (CHAT, {"tools": [{"type": "custom", "custom": {}}]}),
        (CHAT, {"n": "two"}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}),
        (RESPONSES, {"tools": [{"type": "web_search"}]}),
        (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (ANTHROPIC, {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]}),
        (ANTHROPIC, {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        (ANTHROPIC, {"system": [{"type": "image"}]}),
    ],
)
def test_content_that_the_model_cannot_read_is_refused(dialect: Any, more: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        dialect.read({**BODIES[dialect], **more})


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BLOCKS = [
    {"type": "thinking", "thinking": "so", "signature": "x"},
    {"type": "text", "text": "a"},
    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}], "summary": []},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "a"},
]


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
        (CHAT, {"messages": [*ASK, {"role": "assistant", "tool_calls": [CALLED]}]}),
        (CHAT, {"tools": [{"type": "function", "function": FUNCTION}]}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}),
        (CHAT, {"stream_options": {"include_usage": True}}),
        (RESPONSES, {"input": ITEMS}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}),
        (ANTHROPIC, {"system": [{"type": "text", "text": "a"}]}),
        (ANTHROPIC, {"messages": [{"role": "assistant", "content": BLOCKS}]}),
        (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]}),
        (ANTHROPIC, {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}),
    ],
)
def test_an_unknown_field_at_any_depth_is_refused_by_name(dialect: Any, body: dict[str, Any]) -> None:
    """Every object of a request is extended by one, but those that are the agent's own: schemas and arguments."""
    whole = {**BODIES[dialect], **body}
    dialect.read(whole)
    places = list(objects(whole))
    assert len(places) > 1
    for place in places:
        changed = msgspec.json.decode(msgspec.json.encode(whole))
        at = changed
        for step in place:
            at = at[step]
        at["unheard_of"] = 1
        with pytest.raises(DataError, match="unheard_of"):
            dialect.read(changed)


def objects(value: Any, *place: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        yield place
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        is_own = name in {"parameters", "schema", "input_schema"} or (name == "input" and isinstance(inner, dict))
        if isinstance(inner, dict | list) and not is_own:
            yield from objects(inner, *place, name)


def test_a_tool_that_failed_says_so_to_the_model() -> None:
    result = {"type": "tool_result", "tool_use_id": "x", "content": "no such file", "is_error": True}
    read = ANTHROPIC.read({**BODIES[ANTHROPIC], "messages": [{"role": "user", "content": [result]}]})
    assert read.messages == [ChatMessage(role="tool", content="Error: no such file", tool_call_id="x")]
    result["is_error"] = "yes"
    with pytest.raises(DataError, match="is_error"):
        ANTHROPIC.read({**BODIES[ANTHROPIC], "messages": [{"role": "user", "content": [result]}]})


def test_logprobs_are_in_a_response_that_is_to_include_them() -> None:
    asked = RESPONSES.read({**BODIES[RESPONSES], "include": ["message.output_text.logprobs"], "stream": True})
    assert asked.logprobs
    message = ChatMessage(role="assistant", content="a")
    sample = AnswerSample(message=message, finish_reason="stop", tokens=1, logprobs=[("a", -0.5)])
    answer = ModelAnswer(id="abc", created_s=1, samples=[sample], prompt_tokens=5)
    expected = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]
    assert RESPONSES.answer(asked, answer)["output"][0]["content"][0]["logprobs"] == expected
    deltas = [one.data for one in RESPONSES.events(asked, answer) if one.name == "response.output_text.delta"]
    assert [delta["logprobs"] for delta in deltas if delta] == [expected]
    plain = RESPONSES.answer(RESPONSES.read(BODIES[RESPONSES]), answer)
    assert plain["output"][0]["content"][0]["logprobs"] == []


def test_what_changes_nothing_is_accepted() -> None:
    CHAT.read({**BODIES[CHAT], "user": "x", "store": True, "frequency_penalty": 0, "tool_choice": "auto"})
    RESPONSES.read({**BODIES[RESPONSES], "store": False, "text": {"format": {"type": "text"}}, "include": []})
    ANTHROPIC.read({**BODIES[ANTHROPIC], "thinking": {"type": "enabled", "budget_tokens": 5}, "metadata": {}})


@pytest.mark.parametrize("dialect", DIALECTS.values())
def test_each_dialect_says_the_same_request(dialect: Any) -> None:
    more: dict[str, Any] = {
        CHAT: {
            "messages": [{"role": "developer", "content": "s"}, *ASK],
            "tools": [{"type": "function", "function": FUNCTION | {"strict": True}}],
            "max_completion_tokens": 7,
        },
        RESPONSES: {
            "instructions": "s",
            "tools": [{"type": "function", "strict": True, **FUNCTION}],
            "max_output_tokens": 7,
        },
        ANTHROPIC: {
            "system": [{"type": "text", "text": "s"}],
            "tools": [{"name": "add", "description": "Add.", "input_schema": SCHEMA}],
            "max_tokens": 7,
        },
    }[dialect]
    read = dialect.read({**BODIES[dialect], **more, "temperature": 1})
    assert read == ModelRequest(
        messages=[ChatMessage(role="system", content="s"), ChatMessage(role="user", content="?")],
        tools=[{"type": "function", "function": FUNCTION}],
        model="m",
        max_tokens=7,
        temperature=1.0,
    )


TOOLS = {
    CHAT: [{"type": "function", "function": FUNCTION}],
    RESPONSES: [{"type": "function", **FUNCTION}],
    ANTHROPIC: [{"name": "add", "description": "Add.", "input_schema": SCHEMA}],
}


@pytest.mark.parametrize(
    ("dialect", "any_tool", "named"),
    [
        (CHAT, "required", {"type": "function", "function": {"name": "add"}}),
        (RESPONSES, "required", {"type": "function", "name": "add"}),
        (ANTHROPIC, {"type": "any"}, {"type": "tool", "name": "add"}),
    ],
    ids=DIALECTS,
)
def test_a_call_of_a_tool_is_forced_in_each_dialect(dialect: Any, any_tool: Any, named: Any) -> None:
    free = dialect.read({**BODIES[dialect], "tools": TOOLS[dialect]})
    for choice in (any_tool, named):
        read = dialect.read({**BODIES[dialect], "tools": TOOLS[dialect], "tool_choice": choice})
        assert (read.forced_tools, read.tools) == (["add"], free.tools)
        assert read.digest != free.digest
        found = structured_outputs(read, "")
        assert found is not None
        assert found.structural_tag is not None
        tag = msgspec.json.decode(found.structural_tag)["format"]
        assert read_answer(tag["begin"] + "{}" + tag["end"], "", opened=False, has_tools=True, new_id=lambda: "x") == (
            ChatMessage(role="assistant", content="", tool_calls=[ToolCall(name="add", arguments="{}", id="x")])
        )
    assert structured_outputs(free, "") is None
    other = msgspec.json.decode(msgspec.json.encode(named).replace(b"add", b"subtract"))
    with pytest.raises(DataError, match="subtract"):
        dialect.read({**BODIES[dialect], "tools": TOOLS[dialect], "tool_choice": other}).check()


@pytest.mark.parametrize(
    ("dialect", "field", "value"),
    [
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
        (RESPONSES, "text", {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}),
    ],
)
def test_a_schema_that_an_answer_must_match_is_passed_on(dialect: Any, field: str, value: Any) -> None:
    read = dialect.read({**BODIES[dialect], field: value})
    assert structured_outputs(read, "") == StructuredOutputs(json=SCHEMA)
    kind = "format" if field == "text" else field
    any_object = {"type": "json_object"}
    read = dialect.read({**BODIES[dialect], field: {kind: any_object} if field == "text" else any_object})
    assert structured_outputs(read, "") == StructuredOutputs(json={"type": "object"})
    both = structured_outputs(dialect.read({**BODIES[dialect], field: value, "tools": TOOLS[dialect]}), "")
    assert both is not None
    assert both.structural_tag is not None
    elements = msgspec.json.decode(both.structural_tag)["format"]["elements"]
    assert [one["type"] for one in elements] == ["json_schema", "tag"]  # an agent that has tools may call one first


def test_a_thought_that_the_prompt_has_opened_ends_before_a_forced_answer() -> None:
    request = CHAT.read({**BODIES[CHAT], "response_format": {"type": "json_object"}})
    for opened, closed in (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷")):
        found = structured_outputs(request, opened)
        assert found is not None
        assert found.structural_tag is not None
        assert msgspec.json.decode(found.structural_tag)["format"]["elements"][0]["end"] == closed
        assert closes_thought(closed)
    with pytest.raises(DataError, match="think_start"):
        structured_outputs(request, "<|think_start|>")


TEXT = st.text(alphabet="ab \n{}<>é", max_size=8)
CALLS = st.lists(st.builds(lambda text: {"a": text, "b": [1, None]}, TEXT), max_size=3)


def sent_back(dialect: Any, answer: dict[str, Any]) -> dict[str, Any]:
    """Return a request in which an agent sends an answer back as a part of its history."""
    if dialect is CHAT:
        said = {name: value for name, value in answer["choices"][0]["message"].items() if value is not None}
        return {"messages": [*ASK, said, *ASK]}
    if dialect is RESPONSES:
        return {"input": [*ASK, *answer["output"], *ASK]}
    return {"messages": [*ASK, {"role": "assistant", "content": answer["content"]}, *ASK]}


@given(content=TEXT, thinking=st.sampled_from(["", "<think>so</think>\n\n"]), arguments=CALLS)
def test_an_answer_that_comes_back_is_recognized_in_every_dialect(
    content: str, thinking: str, arguments: list[Any]
) -> None:
    calls = [
        ToolCall(name="add", arguments=msgspec.json.encode(one).decode(), id=f"call{number}")
        for number, one in enumerate(arguments)
    ]
    said = ChatMessage(role="assistant", content=content, thinking=thinking, tool_calls=calls)
    user = ChatMessage(role="user", content="?")
    for dialect in DIALECTS.values():
        request = dialect.read(BODIES[dialect])
        body = msgspec.json.decode(msgspec.json.encode(dialect.answer(request, answered(said))))
        again = dialect.read({"model": "m", **sent_back(dialect, body)})
        assert conversation_keys(again.messages, []) == conversation_keys([user, said, user], [])


@given(content=TEXT.filter(bool), thinking=st.sampled_from(["", "<think>so</think>\n\n"]), arguments=CALLS)
def test_a_stream_adds_up_to_the_whole_answer(content: str, thinking: str, arguments: list[Any]) -> None:
    calls = [
        ToolCall(name="add", arguments=msgspec.json.encode(one).decode(), id=f"call{number}")
        for number, one in enumerate(arguments)
    ]
    said = ChatMessage(role="assistant", content=content, thinking=thinking, tool_calls=calls)
    for dialect in DIALECTS.values():
        request = dialect.read({**BODIES[dialect], "stream": True})
        events = [event.data for event in dialect.events(request, answered(said)) if event.data is not None]
        if dialect is CHAT:
            deltas = [one["choices"][0]["delta"] for one in events]
            assert "".join(delta.get("content") or "" for delta in deltas) == thinking + content
            found = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", [])]
        elif dialect is ANTHROPIC:
            deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
            assert "".join(delta.get("thinking", "") for delta in deltas) == thinking
            assert "".join(delta.get("text", "") for delta in deltas) == content
            found = [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
        else:
            assert "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta") == content
            found = [one["arguments"] for one in events if one["type"] == "response.function_call_arguments.done"]
            assert [one["sequence_number"] for one in events] == list(range(len(events)))
        assert found == [call.arguments for call in calls]


@pytest.mark.parametrize(
    ("finish_reason", "stop", "calls", "expected"),
    [
        ("stop", None, [], ("stop", "end_turn", "completed")),
        ("stop", "END", [], ("stop", "stop_sequence", "completed")),
        ("length", None, [], ("length", "max_tokens", "incomplete")),
        ("stop", None, [ToolCall(name="a", arguments="{}", id="x")], ("tool_calls", "tool_use", "completed")),
    ],
)
def test_how_an_answer_ended(
    finish_reason: str, stop: str | None, calls: list[ToolCall], expected: tuple[str, str, str]
) -> None:
    chat, anthropic, responses = expected
    said = ChatMessage(role="assistant", content="x", tool_calls=calls)
    answer = answered(said, finish_reason=finish_reason, stop=stop)
    assert CHAT.answer(CHAT.read(BODIES[CHAT]), answer)["choices"][0]["finish_reason"] == chat
    body = ANTHROPIC.answer(ANTHROPIC.read(BODIES[ANTHROPIC]), answer)
    assert (body["stop_reason"], body["stop_sequence"]) == (anthropic, stop)
    assert RESPONSES.answer(RESPONSES.read(BODIES[RESPONSES]), answer)["status"] == responses


def test_results_of_tools_are_messages_of_their_own() -> None:
    results = [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "3"}]}]
    read = ANTHROPIC.read(
        {**BODIES[ANTHROPIC], "messages": [{"role": "user", "content": [*results, {"type": "text", "text": "go"}]}]}
    )
    assert read.messages == [
        ChatMessage(role="tool", content="3", tool_call_id="x"),
        ChatMessage(role="user", content="go"),
    ]
    items = [{"type": "function_call_output", "call_id": "x", "output": "3"}, {"role": "user", "content": "go"}]
    assert RESPONSES.read({**BODIES[RESPONSES], "input": items}).messages == read.messages


def test_a_request_is_known_by_what_its_answer_depends_on() -> None:
    request = CHAT.read(BODIES[CHAT])
    assert request.digest == CHAT.read({**BODIES[CHAT], "stream": True, "user": "x"}).digest
    for field, value in (("seed", 1), ("n", 2), ("max_tokens", 3), ("stop", "x"), ("temperature", 0.5)):
        assert request.digest != CHAT.read({**BODIES[CHAT], field: value}).digest


@pytest.mark.parametrize("messages", [[], [*ASK, {"role": "assistant", "content": "and then"}]])
def test_there_must_be_something_to_answer(messages: list[Any]) -> None:
    with pytest.raises(DataError):
        CHAT.read({**BODIES[CHAT], "messages": messages}).check()


def read(text: str, *, whole: str = "", opened: bool = False, tools: bool = True) -> ChatMessage:
    return read_answer(text, whole or text, opened=opened, has_tools=tools, new_id=lambda: "id")


def test_what_the_model_wrote_is_thinking_text_and_calls() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    found = read(f"<think>so</think>\n\nI add.\n{call}")
    assert (found.thinking, found.content) == ("<think>so</think>\n\n", "I add.")
    assert found.tool_calls == [ToolCall(name="add", arguments='{"a":1}', id="id")]
    assert read(f"so</think>{call}", opened=True).thinking == "so</think>"
    assert read(f"<think>{call}</think>no").tool_calls == []
    assert read(call, tools=False).content == call
    assert read("<tool_call>{broken</tool_call>").content == "<tool_call>{broken</tool_call>"


def test_calls_behind_special_tokens_are_read_and_are_no_part_of_the_text() -> None:
    found = read(
        'I add. [{"name": "add", "arguments": {}}]', whole='I add. [TOOL_CALLS] [{"name": "add", "arguments": {}}]</s>'
    )
    assert (found.content, [call.name for call in found.tool_calls]) == ("I add.", ["add"])


def test_the_text_at_which_an_answer_ended_is_the_first_and_of_two_the_longest() -> None:
    assert first_stop("a END b STOP", ["STOP", "END"]) == "END"
    assert first_stop("a ENDING", ["END", "ENDING"]) == "ENDING"
    assert first_stop("a", ["END"]) is None


@pytest.mark.parametrize("dialect", DIALECTS.values())
def test_errors_have_the_form_of_the_dialect(dialect: Any) -> None:
    error = dialect.error(400, "why", "code")["error"]
    assert (error["message"], error["type"]) == ("why", "invalid_request_error")
    event = dialect.error_event(503, "why")
    assert event.data is not None
    assert "why" in str(event.data)


@pytest.mark.parametrize("arguments", ["[" * 5000, '{"a":' * 5000, "{", "9" * 5000])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_a_call_whose_arguments_cannot_be_read_is_answered(dialect: Any, arguments: str) -> None:
    call = ToolCall(name="add", arguments=arguments, id="abc")
    request = dialect.read(BODIES[dialect])
    answer = answered(ChatMessage(role="assistant", content="", tool_calls=[call]))
    assert "add" in str(dialect.answer(request, answer))
    assert any("add" in str(event.data) for event in dialect.events(request, answer))


def test_a_turn_of_very_many_items_is_merged_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0

    def noted(**fields: Any) -> ChatMessage:
        nonlocal copied
        copied += len(fields.get("tool_calls", ())) + len(fields["content"])
        return ChatMessage(**fields)

    monkeypatch.setattr(responses, "ChatMessage", noted)
    many = 500
    said = {"type": "message", "role": "assistant", "content": "x"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    request = RESPONSES.read({"model": "m", "input": [*[said] * many, *[call] * many, *ASK]})
    assert [(one.role, one.content, len(one.tool_calls)) for one in request.messages] == [
        ("assistant", "x" * many, many), ("user", "?", 0),
    ]  # fmt: skip
    assert copied == 4 * many + 1
