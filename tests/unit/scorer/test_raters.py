"""The built-in raters, on good and hostile answers."""

# ruff: noqa: RUF001 - other scripts are what is rated

import inspect
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.scorer.answers.number_of_sentence import last_number_in
from lachesis.pipeline.scorer.config import RaterConfig
from lachesis.pipeline.scorer.loader import load_member
from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.scorer.raters import rater_places
from lachesis.pipeline.scorer.raters.json_valid import json_valid
from lachesis.pipeline.scorer.raters.similarity import levenshtein
from lachesis.schemas.errors import ConfigError


def rate(name, completion, answer=None, *, tokens=5, finish="stop", **params):
    task = {} if answer is None else {"answer": answer}
    sample = Sample(prompt="q", completion=completion, task=task, token_count=tokens, finish_reason=finish)
    return load_member(RaterConfig(rater=name, params=params)).rater.rate(sample)


NEEDED = {
    "llm_judge": {"url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "r", "scale": (0.0, 1.0)},
    "pairwise_judge": {"url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "r"},
    "rubric_judge": {"url": "http://127.0.0.1:9/v1", "model": "m"},
    "reward_model": {"url": "http://127.0.0.1:9", "model": "m", "route": "classify"},
}


@pytest.mark.outside
@pytest.mark.parametrize("name", sorted(rater_places()))
def test_every_builtin_loads_with_bounds_and_a_version(name):
    member = load_member(RaterConfig(rater=name, params=NEEDED.get(name, {})))
    assert member.name == name
    assert member.bounds == (0.0, 1.0)
    assert member.describe().version


@pytest.mark.parametrize("name", ["exact_match", "similarity", "numeric"])
def test_no_reference_means_abstain(name):
    assert rate(name, "42") is None


def test_exact_match():
    assert rate("exact_match", " olleh\n", "olleh") == 1.0
    assert rate("exact_match", "Olleh", "olleh") == 0.0
    assert rate("exact_match", "Olleh", "olleh", ignore_case=True) == 1.0
    assert rate("exact_match", "<a>x</a> <a>7</a>", 7, pattern="<a>(.*?)</a>") == 1.0
    assert rate("exact_match", "7", 7, pattern="<a>(.*?)</a>") == 0.0
    assert rate("exact_match", "", "x") == 0.0


def test_similarity():
    assert rate("similarity", "abcd", "abcd") == 1.0
    assert rate("similarity", "abxd", "abcd") == 0.75
    assert rate("similarity", "", "abcd") == 0.0


def slow_levenshtein(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (x != y))
    return row[-1]


@given(st.text("abc", max_size=80), st.text("abcd", max_size=80))
def test_levenshtein_against_the_table(a, b):
    assert levenshtein(a, b) == levenshtein(b, a) == slow_levenshtein(a, b)


def test_a_long_completion_is_cheap():
    start = time.process_time()
    assert levenshtein("ab" * 50_000, "ba" * 20) > 0
    assert time.process_time() - start < 5


def test_format_wants_the_form_and_a_finished_completion():
    assert rate("format", "anything") == 1.0
    assert rate("format", "  \n") == 0.0
    assert rate("format", "anything", finish="length") == 0.0
    assert rate("format", "anything", finish="length", finished=False) == 1.0
    assert rate("format", "<think>x\ny</think>z", pattern="<think>.*</think>.+") == 1.0
    assert rate("format", "say <think>x</think>z", pattern="<think>.*</think>.+") == 0.0
    with pytest.raises(ConfigError, match="not a regular expression"):
        rate("format", "x", pattern="(")


def test_length_ramps_outside_its_limits():
    limits = {"shortest": 10, "longest": 20, "ramp": 10}
    assert [rate("length", "x", tokens=t, **limits) for t in (0, 5, 10, 20, 25, 30, 99)] == [0, 0.5, 1, 1, 0.5, 0, 0]


GERMAN = "Die Antwort ist 18, weil sie drei Eier zum Frühstück isst."
ENGLISH = "The answer is 18, because she eats three eggs for breakfast."


def rate_language(completion, question="How many eggs does she have left in the end?", **params):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
    sample = Sample(prompt=question, completion=completion, messages=messages)
    return load_member(RaterConfig(rater="language", params=params)).rater.rate(sample)


def test_language_is_that_of_the_question_or_the_expected_one():
    assert rate_language(ENGLISH) == 1.0
    assert rate_language(GERMAN) == 0.0
    assert rate_language(GERMAN, "Wie viele Eier hat sie am Ende noch übrig?") == 1.0
    assert rate_language(GERMAN, expected="de") == 1.0
    assert rate_language(GERMAN, expected=["en", "fr"]) == 0.0
    assert rate_language("18") is None
    assert rate_language(ENGLISH, "3 + 15 = ?") is None
    assert rate_language(f"{ENGLISH * 10}{GERMAN * 20}") == pytest.approx(1 / 3)


def test_language_is_that_of_the_answer_unless_thinking_counts():
    thought = f"<think>{ENGLISH * 20}</think>{GERMAN}"
    assert rate_language(thought, expected="de") == 1.0
    assert rate_language(thought, expected="de", thinking=True) < 1.0
    assert rate_language(f"<think>{GERMAN}", expected="de") is None


@pytest.mark.parametrize("expected", ["German", "DE", ["en", ""], "d1"])
def test_language_needs_codes(expected):
    with pytest.raises(ConfigError, match="ISO 639"):
        rate_language(ENGLISH, expected=expected)


def test_repetition():
    assert rate("repetition", "") == 0.0
    assert rate("repetition", "two words") == 1.0
    assert rate("repetition", "a b c d") == 1.0
    assert rate("repetition", "a " * 100) == pytest.approx(1 / 98)


@pytest.mark.parametrize(
    ("text", "most"),
    [("你好" * 50, 0.1), ("ありがとう" * 30, 0.1), ("สวัสดี" * 30, 0.1), ("ha" * 100, 0.1), ("=" * 200, 0.1),
     ("你好，" * 50, 0.1), ("你好 " * 50, 0.1), ("안녕 " * 50, 0.1), ("the cat " * 50, 0.1), ("a,b," * 100, 0.1),
     ("ha" * 15, 0.1), ("a" * 30, 0.1), ("1" * 31, 0.1), ("=-" * 14, 0.1), ("-" * 30, 0.1), ("1," * 15, 0.1),
     ("lol" * 8, 0.2), ("Sure!" + "a" * 25, 0.1), ("?!" * 10, 0.2), ("a" * 12, 0.2), ("0" * 25, 0.1),
     ("😂" * 15, 0.1), ("❤️" * 10, 0.2), ("🇫🇷" * 8, 0.2), ("안녕하세요" * 5, 0.3), ("ㅋ" * 12, 0.2), ("ه" * 13, 0.1),
     ("สวัสดี" * 5, 0.3), ("こんにちは" * 6, 0.2), ("да" * 12, 0.1), ("क" * 20, 0.1), (r"\n" * 15, 0.1)],
)  # fmt: skip
def test_repetition_is_seen_in_every_script(text, most):
    assert rate("repetition", text) < most


@pytest.mark.parametrize(
    "text",
    ["今天天气很好，我们一起去公园散步吧。", "吾輩は猫である。名前はまだ無い。", "ผมชอบกินข้าวผัดมาก",
     "the quick brown fox jumps over a lazy dog", "https://example.org/a/path/to/some-page?query=1234567890",
     "1000000", "0.3333333333333333", "1,000,000,000,000,000", "10" * 8, "1" + "0" * 30, "hahaha", "-----",
     "The sum is 5.\n-----\nDone", "| a | b |\n|---|---|\n| 1 | 2 |", "# " + "-" * 76 + "\nimport os, of which more",
     "+------+------+\n| a    | b    |", "if x:\n        y = 1\n        z = 2", "Name: ______________",
     "مرحبا كيف حالك اليوم", "안녕하세요 저는 학생입니다",
     "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"],
)  # fmt: skip
def test_what_does_not_repeat_itself_is_rated_well(text):
    assert rate("repetition", text) > 0.9


def test_repetition_needs_an_n():
    with pytest.raises(ConfigError, match="n is 0"):
        rate("repetition", "a b c", n=0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("so 1,234.5.", 1234.5), ("3/4", 0.75), ("-2e3", -2000.0), ("x=.5", 0.5), ("no", None), ("1/0", None),
     ("1e9999", None), ("", None), ("9" * 5000, None), ("4 / 8 apples", 0.5)],
)  # fmt: skip
def test_last_number(text, value):
    number = last_number_in(text)
    assert (None if number is None else number.value) == value


def test_numeric():
    assert rate("numeric", "the answer is 42.0", "42") == 1.0
    assert rate("numeric", "42 or 43", 42) == 0.0
    assert rate("numeric", "none", 42) == 0.0
    assert rate("numeric", "41.9", 42, abs_tol=0.2) == 1.0
    assert rate("numeric", "1" + "," * 100_000, 2) == 0.0


def test_json_valid():
    assert rate("json_valid", '{"a": 1}') == 1.0
    assert rate("json_valid", '{"a": 1}', required=["a"]) == 1.0
    assert rate("json_valid", '{"a": 1}', required=["b"]) == 0.0
    assert rate("json_valid", "[1]", required=["b"]) == 0.0
    for bad in ("", "{", "NaN", '{"a": Infinity}', "[" * 200_000, "9" * 10_000, "-1e999", '{"a": [1E400]}'):
        assert rate("json_valid", bad) == 0.0
    assert rate("json_valid", "text ```json\n[1]\n```", pattern="```json(.*?)```") == 1.0


@pytest.mark.parametrize("answer", ["1e999", '{"n": -1e309}'])
def test_a_number_beyond_a_floats_range_is_no_way_round_a_schema(answer):
    sample = Sample(prompt="q", completion=answer, task={})
    schema = {"properties": {"n": {"multipleOf": 0.1}}, "multipleOf": 0.1}
    assert json_valid(sample, schema=schema) == 0.0


def test_a_reference_in_a_schema_is_not_fetched(monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "create_connection", lambda *given, **_: asked.append(given))
    with pytest.raises(Exception, match="Unresolvable"):
        json_valid(Sample(prompt="q", completion='"a"', task={}), schema={"$ref": "http://127.0.0.1:9/other.json"})
    assert asked == []


def opened(name, completion, answer=None, **params):
    sample = Sample(prompt="q", completion=completion, task={"answer": answer} if answer else {}, opened="<think>")
    return load_member(RaterConfig(rater=name, params=params)).rater.rate(sample)


def test_a_completion_whose_thinking_the_prompt_opened_is_read_with_it():
    assert opened("format", "x</think>y", pattern="<think>.*</think>.+") == 1.0
    assert opened("format", "x", pattern="<think>.*</think>.+") == 0.0
    assert opened("numeric", "it is 4</think> 5", "5") == 1.0
    assert opened("numeric", "it is 5", "5") == 0.0, "it was cut off while thinking"
    assert opened("exact_match", "it is 4</think>\n5", "5") == 1.0
    in_prompt = Sample(prompt="q<think>\n", completion="x</think>y", task={})
    assert (
        load_member(RaterConfig(rater="format", params={"pattern": "<think>.*</think>y"})).rater.rate(in_prompt) == 1.0
    )


@pytest.mark.parametrize(
    ("name", "completion", "answer", "params", "value"),
    [
        ("exact_match", "<think>no</think>\nyes", "yes", {}, 1.0),
        ("exact_match", "<think>yes", "yes", {}, 0.0),
        ("exact_match", "cafe\u0301", "caf\u00e9", {}, 1.0),
        ("exact_match", "a\r\nb", "a\nb", {}, 1.0),
        ("exact_match", "\ufeffyes\u200b", "yes", {}, 1.0),
        ("exact_match", "<a>x</a></think><a>7</a>", "7", {"pattern": "<a>(.*?)</a>"}, 1.0),
        ("exact_match", "<think><a>7</a>", "7", {"pattern": "<a>(.*?)</a>"}, 0.0),
        ("exact_match", "<think>7</think>8", "7", {"pattern": "<think>(.*?)</think>"}, 1.0),
        ("similarity", "<think>long thoughts</think>abcd", "abcd", {}, 1.0),
        ("json_valid", '<think>{</think>{"a": 1}', None, {}, 1.0),
        ("json_valid", '```json\n{"a": 1}\n```', None, {"required": ["a"]}, 1.0),
        ("json_valid", '~~~JSON\r\n{"a": 1}\r\n~~~', None, {}, 1.0),
        ("json_valid", '\ufeff{"a": 1}', None, {}, 1.0),
        ("json_valid", 'Here: ```json\n{"a": 1}\n```', None, {}, 0.0),
        ("json_valid", '```python\n{"a": 1}\n```', None, {}, 0.0),
        ("math", r"<think>\boxed{1}", "1", {}, 0.0),
    ],
)
async def test_only_the_answer_is_read_and_in_one_form(name, completion, answer, params, value):
    rated = rate(name, completion, answer, **params)
    assert (await rated if inspect.isawaitable(rated) else rated) == value
