"""A thousand pairs of a reference and an answer, with the verdicts of this build, math-verify and a person.

A line of `math_pairs.jsonl` is [kind, reference, answer, ours, math-verify's, a person's, why]. Where the three differ,
`why` says by what rule it was decided.
"""

import json
import logging
from pathlib import Path

import pytest

from lachesis.pipeline.scorer.answers.compare_math import equal, equal_or_unsure, reference_answer

LINES = Path(__file__).with_name("math_pairs.jsonl").read_text(encoding="utf-8").splitlines()
PAIRS = [json.loads(line) for line in LINES]


def test_the_table_is_large_and_every_difference_has_its_reason() -> None:
    assert len(PAIRS) > 1000
    assert len({(gold, given) for _, gold, given, *_ in PAIRS}) == len(PAIRS)
    for *pair, ours, theirs, person, why in PAIRS:
        assert why or ours == theirs == person, pair
    assert {ours for *_, ours, _, _, _ in PAIRS} == {True, False}


@pytest.mark.slow
def test_every_pair_is_judged_as_decided() -> None:
    wrong = [
        (kind, gold, given, ours)
        for kind, gold, given, ours, *_ in PAIRS
        if equal(reference_answer(gold), given) is not ours
    ]
    assert wrong == []


def test_a_person_agrees_with_every_verdict() -> None:
    assert [pair for pair in PAIRS if pair[3] is not pair[5]] == []


def test_most_pairs_need_no_computer_algebra() -> None:
    sure = [equal_or_unsure(reference_answer(gold), given) != "unsure" for _, gold, given, *_ in PAIRS]
    assert sum(sure) > 0.6 * len(sure)


@pytest.mark.slow
def test_the_column_of_math_verify_is_what_it_says() -> None:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    differ = []
    for _, gold, given, _, theirs, *_ in PAIRS:
        expected, answer = (parse(f"${text}$", parsing_timeout=None) for text in (reference_answer(gold), given))
        if bool(verify(expected, answer, timeout_seconds=None)) is not theirs:
            differ.append((gold, given, theirs))
    assert differ == []
