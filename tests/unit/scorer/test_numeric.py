"""The numeric rater on answers as models write them.

A line of `numeric_answers.jsonl` is [completion, reference, rating], null where the rater abstains; one of
`numeric_sentences.jsonl` is [completion, reference, rating, a person's verdict, why]: answers without a mark. Half of
them are hedged and worth nothing, the others are usual last sentences.
"""

import json
from pathlib import Path

import pytest

from lachesis.pipeline.scorer.answers.number_of_sentence import last_number_in
from lachesis.pipeline.scorer.answers.number_of_short_answer import read_number
from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.scorer.raters.numeric import numeric

ANSWERS = [
    json.loads(line)
    for line in Path(__file__).with_name("numeric_answers.jsonl").read_text(encoding="utf-8").splitlines()
]
SENTENCES = [
    json.loads(line)
    for line in Path(__file__).with_name("numeric_sentences.jsonl").read_text(encoding="utf-8").splitlines()
]


def numeric_of(completion: str, answer: str) -> float | None:
    value: float | None = numeric(Sample(prompt="", completion=completion, task={"answer": answer}))
    return value


@pytest.mark.parametrize(("completion", "answer", "rating"), ANSWERS)
def test_answers_are_read_as_a_person_reads_them(completion: str, answer: str, rating: float | None) -> None:
    assert numeric_of(completion, answer) == rating


def test_a_sentence_is_worth_something_only_if_it_offers_one_number() -> None:
    assert len(SENTENCES) > 1000
    wrong = [line for line in SENTENCES if numeric_of(line[0], line[1]) != line[2]]
    assert wrong == []


def test_nothing_is_paid_that_a_person_would_not_pay() -> None:
    for completion, _, rating, person, why in SENTENCES:
        assert rating != 1.0 or person == "right", completion
        assert why or (rating == 1.0 and person == "right"), completion


@pytest.mark.parametrize(
    "mark", ["The answer is {}", "**{}**", "#### {}", "<answer>{}</answer>", "\\boxed{{\\text{{{}}}}}"]
)
def test_a_mark_pays_for_no_hedge_either(mark: str) -> None:
    paid = [
        completion
        for completion, answer, rating, person, _ in SENTENCES
        if rating == 0.0 and person == "wrong" and "\n" not in completion and not completion.startswith("#")
        if numeric_of(mark.format(completion), answer) == 1.0
    ]
    assert paid == []


@pytest.mark.parametrize(
    "text",
    ["1" * 100_000, "1," * 50_000, "a" * 50_000 + "=1", "(" * 20_000 + "1", r"\frac{1}" * 10_000, "1 " * 50_000,
     "answer is " * 10_000, "**" * 30_000 + "1", "<answer>" * 10_000 + "1", r"\boxed{" * 5_000, "x_" * 20_000 + "= 1",
     "#### " * 10_000 + "1", "a b " * 20_000 + "= 1", "-" * 50_000 + "1", "1^" * 10_000 + "1", "1/" * 10_000 + "1"],
)  # fmt: skip
def test_hostile_text_is_read_before_the_time_limit_of_a_test(text: str) -> None:
    numeric(Sample(prompt="", completion=text, task={"answer": "1"}))
    read_number(text[:2000])
    last_number_in(text)


def test_a_power_is_computed_only_while_it_is_small() -> None:
    assert read_number("2^{400}") is not None
    assert read_number("9^{999999}") is None
    assert read_number("9^{99999999999999}") is None
    assert read_number("1e99999") is None
    assert read_number("0^{-1}") is None
