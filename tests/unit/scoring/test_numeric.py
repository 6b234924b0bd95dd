"""The numeric rater on answers as models write them.

A line of `numeric_answers.jsonl` is [completion, reference, rating], null where the rater abstains.
"""

import json
from pathlib import Path

import pytest

from lachesis.pipeline.scoring.rater import Sample
from lachesis.pipeline.scoring.raters.last_number import last_number_in
from lachesis.pipeline.scoring.raters.number import read_number
from lachesis.pipeline.scoring.raters.numeric import numeric

ANSWERS = [
    json.loads(line)
    for line in Path(__file__).with_name("numeric_answers.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize(("completion", "answer", "rating"), ANSWERS)
def test_answers_are_read_as_a_person_reads_them(completion: str, answer: str, rating: float | None) -> None:
    assert numeric(Sample(prompt="", completion=completion, task={"answer": answer})) == rating


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
