"""Tool calls that are only thought of are not run, however a template marks thoughts; they are counted."""

import json
from typing import Any

import pytest

from lachesis import Environment, Session, Task, tool
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.rollout import build_group, collect_group
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.tasks.thoughts import answer_part, opened_thought
from lachesis.pipeline.tasks.tool_calls import parse_tool_calls, text_without_calls


def call(number: int, text: str = "") -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {number}, "t": {json.dumps(text)}}}}}</tool_call>'


ONE, TWO, NINE = call(1), call(2), call(9)
READ = [
    (f"<think>{NINE}</think>{ONE}", [1], 1),
    (f"<think>{NINE}{NINE}</think>{ONE}{TWO}", [1, 2], 2),
    (f"<think>I could {NINE}", [], 1),
    (f"{ONE} <think> {NINE}", [1], 1),
    (f"{ONE}<think>{NINE}</think>{TWO}<think>{NINE}</think>", [1, 2], 2),
    (f"I could {NINE} or not </think> {ONE}", [1], 1),  # the template has opened it
    (f"<THINK>{NINE}</THINK>{ONE}", [1], 1),
    (f"<thinking>{NINE}</thinking>{ONE}", [1], 1),
    (f"<thought>{NINE}</thought>{ONE}", [1], 1),
    (f"<reasoning>{NINE}</reasoning>{ONE}", [1], 1),
    (f"<seed:think>{NINE}</seed:think>{ONE}", [1], 1),
    (f"[THINK]{NINE}[/THINK]{ONE}", [1], 1),
    (f"◁think▷{NINE}◁/think▷{ONE}", [1], 1),
    (f"<|begin_of_thought|>{NINE}<|end_of_thought|>{ONE}", [1], 1),
    (f"<|START_THINKING|>{NINE}<|END_THINKING|>{ONE}", [1], 1),
    (f"<unused94>thought {NINE}<unused95>{ONE}", [1], 1),
    (f"<|channel|>analysis<|message|>{NINE}<|end|><|start|>assistant<|channel|>final<|message|>{ONE}", [1], 1),
    (f"<|channel|>analysis<|message|>{NINE}<|channel|>commentary<|message|>{ONE}", [1], 1),
    (ONE + call(2, "<think>") + call(3), [1, 2, 3], 0),  # a marker that a call passes on is content
    (call(1, "</think>") + TWO, [1, 2], 0),
    (f"<think>a</think>{ONE}</think>{TWO}", [1, 2], 0),
    (ONE + TWO, [1, 2], 0),
    (f"<think><think>{NINE}</think>{NINE}</think>{ONE}", [1], 2),
    (f"<think>a<think>b<think>{NINE}</think>{NINE}</think>{NINE}</think>{ONE}", [1], 3),
    (f"<think><think>{NINE}</think><think>{NINE}</think>{NINE}</think>{ONE}", [1], 3),
    (f"<think>a<think>{NINE}</think>{NINE}", [], 2),
    (f"<think>\n<think>{NINE}</think>{ONE}", [1], 1),  # opened by the template and again by the model
    (f"<think><reasoning>{NINE}</reasoning>{NINE}</think>{ONE}", [1], 2),
    (f"<think><reasoning>{NINE}</think>{ONE}", [1], 1),
    (f"<thinking><thinking>{NINE}</thinking>{NINE}</thinking>{ONE}", [1], 2),
    (f"[THINK][THINK]{NINE}[/THINK]{NINE}[/THINK]{ONE}", [1], 2),
    (f"<seed:think><seed:think>{NINE}</seed:think>{NINE}</seed:think>{ONE}", [1], 2),
    (f"<|begin_of_thought|>{NINE}<|begin_of_thought|><|end_of_thought|>{NINE}<|end_of_thought|>{ONE}", [1], 2),
    (f"<|channel|>analysis<|message|>{NINE}<|end|><|channel|>analysis<|message|>{NINE}<|end|>{ONE}", [1], 2),
    (f"<think>{call(9, '</think>')}{NINE}</think>{ONE}", [1], 2),
    (f"<think>{NINE}</think></think>{ONE}", [1], 1),
    (f"<mm:think>{NINE}</mm:think>{ONE}", [1], 1),
    (f"<think>{NINE}</think><|START_ACTION|>{ONE}<|END_ACTION|>", [1], 1),
    (f"<think>x</think>The form is\n```xml\n{NINE}\n```\nand now: {ONE}", [1], 1),
    (f"<think>x</think>\n```xml\n{ONE}\n```\n", [1], 0),  # all that is said
    (call(1, "```\nx\n```") + call(2, "a\n```"), [1, 2], 0),
    (f"Code:\n```python\nx = 1\n```\n{ONE}", [1], 0),
    (f"<think>```\n{NINE}</think>{ONE}", [1], 1),
    (f"Use `{NINE}` so: {ONE}", [1], 1),
    (f"[THINK]x[/THINK]```xml\n{NINE}\n```\nNow: {ONE}", [1], 1),
    (f"`{ONE}`", [1], 0),  # all that is said
    (f"`{ONE} and {TWO}", [1, 2], 0),
    (f"```\n<think>{NINE}</think>\n```\n{ONE}", [1], 1),
    (f"<|channel|>final<|message|>{ONE}<|end|><|start|>assistant<|channel|>analysis<|message|>{NINE}", [1], 1),
    (f"<think>\n\n</think>\n\n{ONE}\n{TWO}", [1, 2], 0),
    (f"<thinking>{NINE}</think>{ONE}", [], 2),
    (f"[THINK]The [THINK] tag {NINE}[/THINK] and {NINE}[/THINK]{ONE}", [1], 2),
    (f"<think>\n```\ncode\n</think>\n{ONE}", [1], 0),
    (f"<think>{NINE}</think>{call(1, '</think>')}{TWO}", [1, 2], 1),
]


@pytest.mark.parametrize(("text", "calls", "thought"), READ)
def test_nothing_that_is_only_thought_is_a_call(text: str, calls: list[int], thought: int) -> None:
    found = parse_tool_calls(text)
    assert [json.loads(one.arguments)["a"] for one in found.calls] == calls
    assert (found.thought, found.errors) == (thought, [])


def test_a_thought_that_the_prompt_opened_goes_on_until_it_is_closed() -> None:
    assert parse_tool_calls(ONE, opened=True) == ([], [], 1)
    found = parse_tool_calls(f"{NINE} <think> {NINE} </think> {ONE}", opened=True)
    assert [json.loads(one.arguments)["a"] for one in found.calls] == [1]
    assert opened_thought("<|im_start|>assistant\n<think>\n\n") == "<think>"
    assert opened_thought("<assistant>[THINK]") == "[THINK]"
    assert not opened_thought("<think>\n\n</think>\n\n")
    assert not opened_thought("what does <think> mean?<assistant>")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", "4"),
        ("<think>5</think>4", "4"),
        ("5 </scratchpad> 4", " 4"),
        ("<|START_THINKING|>5<|END_THINKING|>4", "4"),
        ("<|channel>thought\n5<channel|>4", "4"),
        (
            "<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
            "4<|return|>",
        ),
        ("<|channel|>analysis<|message|>5<|end|>", ""),
        ("<think>5</think>4<think>6", ""),
    ],
)
def test_the_answer_follows_the_last_thought(text: str, answer: str) -> None:
    assert answer_part(text) == answer


def test_special_tokens_may_mark_thoughts_that_the_text_does_not_show() -> None:
    found = parse_tool_calls(f"{NINE}{ONE}", whole=f"[THINK]{NINE}[/THINK]{ONE}</s>")
    assert [json.loads(one.arguments)["a"] for one in found.calls] == [1]


@pytest.mark.parametrize("fence", ["```", "```xml", "~~~", "  ````"])
def test_a_call_that_is_shown_in_a_block_of_code_is_not_run_and_is_told(fence: str) -> None:
    text = f"<think>x</think>For example:\n{fence}\n{NINE}\n{fence.rstrip('xml')}\nThat is the form."
    found = parse_tool_calls(text)
    assert (found.calls, found.thought) == ([], 1)
    assert "in a block of code is an example, and is not run" in found.errors[0]
    assert text_without_calls(text) == text


def test_thoughts_within_a_thought_that_the_prompt_opened() -> None:
    for text, calls, thought in [
        (f"{NINE}<think>{NINE}</think>{NINE}</think>{ONE}", [1], 3),
        (f"<think>{NINE}</think>{ONE}", [1], 1),
        (f"<reasoning>{NINE}</reasoning>{NINE}</think>{ONE}", [1], 2),
        (f"a{NINE}", [], 1),
    ]:
        found = parse_tool_calls(text, opened=True)
        assert ([json.loads(one.arguments)["a"] for one in found.calls], found.thought) == (calls, thought)


def test_what_is_left_beside_the_calls_keeps_the_thoughts_whole() -> None:
    assert text_without_calls(f"<think>{NINE}</think> so {ONE}") == f"<think>{NINE}</think> so"
    assert text_without_calls(f"so {ONE}", opened=True) == f"so {ONE}"


def test_arguments_may_be_the_text_of_an_object() -> None:
    def read(arguments: str) -> Any:
        found = parse_tool_calls(f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>')
        return [json.loads(one.arguments) for one in found.calls], found.errors

    assert read(json.dumps('{"a": 1, "t": "x\\"y"}')) == ([{"a": 1, "t": 'x"y'}], [])
    assert read('""') == read("null") == ([{}], [])
    for wrong in ('"two"', json.dumps("[1]"), json.dumps('{"a": ')):
        calls, (error,) = read(wrong)
        assert calls == []
        assert "holds no JSON object" in error


def test_many_openings_are_read_in_time() -> None:
    assert parse_tool_calls("<tool_call>" * 10_000 + "</tool_call>").calls == []
    assert parse_tool_calls("<think></think>" * 10_000 + ONE).calls
    assert not parse_tool_calls(("<think>" * 50 + "</think>" * 49) * 300 + "<think>" + ONE).calls
    assert not parse_tool_calls("<reasoning><think>" * 10_000 + ONE).calls
    assert not parse_tool_calls("`<tool_call>" * 20_000).calls


class Box(Environment):
    max_turns = 3

    def __init__(self) -> None:
        self.ran: list[int] = []

    def __len__(self) -> int:
        return 1

    def task(self, index: int) -> Task:
        return Task(item="q", prompt="q")

    @tool
    def add(self, a: int, t: str = "") -> int:
        """Return a+1."""
        self.ran.append(a)
        return a + 1

    def reward(self, task: Task, session: Session) -> float:
        return 1.0


class Thinker(FakeInference):
    """Its template opens a thought at the end of a prompt."""

    async def tokenize(self, messages: Any, *, add_generation_prompt: bool = True, **given: Any) -> list[int]:
        ids = await super().tokenize(messages, add_generation_prompt=add_generation_prompt, **given)
        return ids + [ord(one) + 5 for one in "<think>\n"] * add_generation_prompt


async def collect(inference: FakeInference, env: Box) -> Any:
    draft = await collect_group(env, env.task(0), inference, 2, SamplingParams(max_tokens=400))
    return build_group(draft, run="r", env="e", producer="p", epoch=1, counter=1, tokenizer_hash="t")


async def test_a_session_runs_what_is_said_and_counts_what_is_thought() -> None:
    env = Box()
    says = f"<think>{NINE}{NINE}</think>{ONE}"
    group = await collect(FakeInference(lambda prompt, number: "done" if "<tool>" in prompt else says), env)
    assert env.ran == [1, 1]
    assert group.metadata["thought_calls"] == [2, 2]


async def test_a_thought_in_a_thought_that_the_template_opened_does_not_end_it() -> None:
    env = Box()
    says = f"so <think>{NINE}</think>{NINE}</think>{ONE}"
    group = await collect(Thinker(lambda prompt, number: "done" if "<tool>" in prompt else says), env)
    assert env.ran == [1, 1]
    assert group.metadata["thought_calls"] == [2, 2]


async def test_a_call_before_the_end_of_a_thought_that_the_template_opened_is_not_run() -> None:
    env = Box()
    group = await collect(Thinker(lambda prompt, number: ONE), env)
    assert env.ran == []
    assert group.metadata["thought_calls"] == [1, 1]
    assert group.sequences.finish_reasons == ["stop", "stop"]
