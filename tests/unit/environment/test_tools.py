"""Tool calls: whatever a model writes is read or answered, and nothing it writes raises."""

import json

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis import Environment, tool
from lachesis.pipeline.environment import tools
from lachesis.pipeline.environment.plain_hooks import HookTimes
from lachesis.pipeline.environment.tools import run_tools
from lachesis.pipeline.tasks.tool_calls import parse_tool_calls, text_without_calls


class Box(Environment):
    @tool
    def add(self, a: int, b: int = 1) -> int:
        """Return a+b."""
        return a + b

    @tool
    async def join(self, parts: list[str]) -> str:
        """Join texts."""
        return "-".join(parts)


async def answers(text: str) -> list[str]:
    return [message.content for message in await run_tools(Box().tools, parse_tool_calls(text), 5)]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


async def test_calls_are_run_in_order_with_checked_arguments() -> None:
    text = "first " + call("add", '{"a": 2}') + " then\n" + call("join", '{"parts": ["x", "y"]}')
    assert await answers(text) == ["3", "x-y"]
    assert await answers(call("add", '{"a": "4", "b": 5}')) == ["9"]


async def test_calls_in_the_forms_of_other_templates_are_run() -> None:
    """Qwen3-Coder and Qwen3.5, Llama, OpenAI, and a call of a tool without arguments."""
    qwen = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>".format
    value = "<parameter={}>\n{}\n</parameter>\n".format
    assert await answers(qwen("add", value("a", "2") + value("b", "5"))) == ["7"]
    assert await answers(qwen("join", value("parts", '["x", "<y>\\n"]'))) == ["x-<y>\n"]
    both = qwen("join", value("parts", "['x', 'y']")) + " and " + qwen("add", value("a", "1"))
    assert await answers(both) == ["x-y", "2"]
    assert await answers(qwen("add", "")) == ["error: add: missing argument 'a'"]
    assert "something else than parameters" in (await answers(qwen("add", "a = 2")))[0]
    assert await answers('<tool_call>{"name": "add", "parameters": {"a": 2}}</tool_call>') == ["3"]
    asked = '{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}'
    assert await answers(f"<tool_call>{asked}</tool_call>") == ["3"]
    assert await answers('<tool_call>{"name": "add"}</tool_call>') == ["error: add: missing argument 'a'"]
    assert "it has no `name`" in (await answers('<tool_call>{"arguments": {"a": 2}}</tool_call>'))[0]


GLM = "<tool_call>{}\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GLM.format("add", "a", "2"), ["3"]),
        (GLM.format("join", "parts", '["x", "<y>\\n"]'), ["x-<y>\n"]),
        ("<tool_call>add</tool_call>", ["error: add: missing argument 'a'"]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}, {"name": "add", "arguments": {"a": 3}}]', ["3", "4"]),
        ('So: [TOOL_CALLS] [{"name": "join", "arguments": {"parts": ["]", "</tool_call>"]}}]</s>', ["]-</tool_call>"]),
        ('[TOOL_CALLS]add[ARGS]{"a": 2}[TOOL_CALLS]add[CALL_ID]x9[ARGS]{"a": 3}', ["3", "4"]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 2}}; {"name": "add", "parameters": {"a": 3}}', ["3", "4"]),
        ('[THINK][TOOL_CALLS]add[ARGS]{"a": 9}[/THINK][TOOL_CALLS]add[ARGS]{"a": 2}', ["3"]),
        ('[TOOL_CALLS]join[ARGS]{"parts": ["[TOOL_CALLS]add[ARGS]{}"]}', ["[TOOL_CALLS]add[ARGS]{}"]),
    ],
)
async def test_calls_of_other_markers_are_run(text: str, said: list[str]) -> None:
    assert await answers(text) == said


@pytest.mark.parametrize(
    "text",
    [
        'Mistral marks calls with [TOOL_CALLS], and so on: {"name": "add", "arguments": {"a": 2}}',
        '<|python_tag|>print({"a": 2})',
        '[{"name": "add", "arguments": {"a": 2}}]',
        '{"name": "add", "parameters": {"a": 2}}',
        'add{"a": 2}',
    ],
)
async def test_what_no_marker_precedes_is_no_call(text: str) -> None:
    assert parse_tool_calls(text) == ([], [], 0)
    assert text_without_calls(text) == text


async def test_marked_calls_that_cannot_be_read_are_told() -> None:
    for text in ('[TOOL_CALLS][{"name": "add", "argum', '[TOOL_CALLS]add[ARGS]{"a": ', GLM.format("a b", "a", "2")):
        (found,) = await answers(text)
        assert found.startswith("error: this tool call is not valid")
    shown = 'So:\n```\n[TOOL_CALLS]add[ARGS]{"a": 2}\n```\n'
    assert "in a block of code is an example" in (await answers(shown))[0]


@pytest.mark.parametrize(
    "start", ["[TOOL_CALLS]", "[TOOL_CALLS]{", '[TOOL_CALLS][{"a":', "[TOOL_CALLS]a[ARGS]{", '<|python_tag|>{"a":[']
)
def test_many_markers_are_read_in_time(start: str) -> None:
    assert not parse_tool_calls(start * 20_000).calls
    assert not parse_tool_calls(start + "[" * 100_000).calls


async def test_the_text_of_a_parameter_is_kept_whole() -> None:
    (found,) = parse_tool_calls(
        "<tool_call><function=run><parameter=code>\n"
        "  if a < b:\n\n    print('<think>')\n\n</parameter></function></tool_call>"
    ).calls
    assert json.loads(found.arguments) == {"code": "  if a < b:\n\n    print('<think>')\n"}
    assert parse_tool_calls("<think>" + "<tool_call><function=run></function></tool_call>") == ([], [], 1)
    for hostile in ("<function=f>" + " " * 60_000 + "x", "<function=f>" + "<parameter=a>" * 20_000):
        assert parse_tool_calls(f"<tool_call>{hostile}</tool_call>").errors


async def test_the_arguments_stay_as_written() -> None:
    (found,) = parse_tool_calls(call("add", '{ "a":  1e0 }')).calls
    assert found.arguments == '{ "a":  1e0 }'


async def test_every_mistake_is_told() -> None:
    assert await answers(call("ad", "{}")) == ["error: there is no tool 'ad'; did you mean 'add'?"]
    assert await answers(call("add", "{}")) == ["error: add: missing argument 'a'"]
    assert await answers(call("add", '{"a": 1, "c": 1}')) == ["error: add: unknown argument 'c'; known: a, b"]
    assert "argument 'a'" in (await answers(call("add", '{"a": "x"}')))[0]
    assert "argument 'self'" in (await answers(call("add", '{"self": 1, "a": 1}')))[0]
    assert (await answers(call("add", "[1]")))[0].startswith("error: add: ")
    assert (await answers("<tool_call>{oops}</tool_call>"))[0].startswith("error: this tool call is not valid")
    assert (await answers("<tool_call>" + "[" * 100_000))[0].startswith("error: this tool call is not valid")
    assert len(await answers(call("add", '{"a": 1}') * 50)) == 17


@given(st.text(alphabet='<>/tool_call{}":nameargumts[]0\\\ud800 ', max_size=80))
def test_parsing_never_raises(text: str) -> None:
    parse_tool_calls(text)
    parse_tool_calls(f"<tool_call>{text}</tool_call>")


def test_instructions_name_every_tool() -> None:
    text = Box().tool_instructions()
    assert "add(a: int, b: int = 1): Return a+b." in text
    assert "join(parts: list[str]): Join texts." in text


async def test_time_in_which_the_loop_is_held_is_not_that_of_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = HookTimes()
    monkeypatch.setattr(tools, "HOOKS", hooks)

    async def look(held_s: float) -> str:
        hooks.record("Sums.reward", 0.0, held_s)  # another sample's
        await anyio.sleep(0.2)
        return "found"

    for held_s, says in ((1000.0, "found"), (0.0, "did not finish")):
        calls = parse_tool_calls(call("look", f'{{"held_s": {held_s}}}') * 2)
        found = [message.content for message in await run_tools({"look": look}, calls, 0.1)]
        assert all(says in content for content in found), found
