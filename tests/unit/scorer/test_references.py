"""References as text: numbers as people write them, and what is no single answer by name."""

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lachesis.pipeline.environment.dataset import Dataset
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.probe import probe_environment
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.loader import load_member
from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.scorer.runner import EnsembleRunner
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.pipeline.tasks.references import reference_text
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.errors import ConfigError

REFUSED: list[Any] = [
    [["17", "18"]], ["17", ""], [], {"value": 18}, b"18", True, False, math.nan, math.inf, "nan", "NaN", "", "  ",
    "\u200e",
]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (18, "18"),
        (18.0, "18"),
        (-0.0, "0"),
        (0.1, "0.1"),
        (1e-05, "0.00001"),
        (1e16, "10000000000000000"),
        (123456.75, "123456.75"),
        (1.5e300, "1.5E+300"),
        (Decimal("18.00"), "18"),
        (Decimal("0.50"), "0.5"),
        (100, "100"),
        (100.0, "100"),
        (" 18 ", "18"),
        ("18.0", "18.0"),
        ("None", "None"),
        ("NaN is not a number", "NaN is not a number"),
    ],
)
def test_a_reference_is_written_as_a_person_writes_it(value: Any, text: str) -> None:
    assert reference_text(value, "here") == text


@pytest.mark.parametrize("value", REFUSED, ids=repr)
def test_what_is_no_single_answer_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^task 7: its answer is .*Mend it: "):
        reference_text(value, "task 7")


@pytest.mark.parametrize(
    ("rater", "right", "wrong"),
    [
        ("math", r"\boxed{17}", r"\boxed{19}"),
        ("numeric", "17", "19"),
        ("exact_match", "17", "19"),
        ("similarity", "17", "99"),
    ],
)
async def test_of_several_references_any_is_right(rater: str, right: str, wrong: str) -> None:
    runner = EnsembleRunner([load_member(RaterConfig(rater=rater))])
    task = {"answer": ["18", "17"]}
    samples = [Sample(prompt="", completion=text, task=task, item="i", env="e") for text in (right, wrong)]
    assert [rating.value for rating in (await runner.rate_group(samples))[rater]] == [1.0, 0.0]


@pytest.mark.parametrize("rater", ["math", "numeric", "exact_match", "similarity"])
async def test_no_sample_pays_for_a_reference_that_is_no_single_answer(rater: str) -> None:
    runner = EnsembleRunner([load_member(RaterConfig(rater=rater))])
    samples = [
        Sample(prompt="", completion=r"\boxed{18}", task={"answer": value}, item=str(number), env="sums")
        for number, value in enumerate(REFUSED)
    ]
    for number, rating in enumerate((await runner.rate_group(samples))[rater]):
        assert (rating.value, rating.status) == (None, "error")
        assert f"item {number} of environment sums: its answer is " in rating.detail
        assert "Mend it: " in rating.detail


class Listed(Environment):
    """Its first task has a plain reference, the others an object."""

    def __len__(self) -> int:
        return 3

    def task(self, index: int) -> Task:
        return Task(item=str(index), prompt="q", task={"answer": {"a": "17"} if index else "18"})


@pytest.mark.parametrize(("rater", "number"), [("numeric", 1), ("math", 1), ("repetition", 0)])
async def test_a_reference_that_no_rater_can_read_is_named_before_anything_is_generated(
    rater: str, number: int
) -> None:
    scorer = EnvironmentScorer(ScoringConfig(raters=[RaterConfig(rater=rater)]), None, explains=True)
    found = await probe_environment(Listed(), "e", scorer)
    assert len(found) == number
    for finding in found:
        assert finding.sure
        assert finding.text.startswith(f"{rater} gave none of 3 scripted answers a rating: ")
        assert "of environment e: its answer is {'a': '17'} (dict)" in finding.text


@pytest.mark.parametrize("value", [value for value in REFUSED if not isinstance(value, bytes | float)], ids=repr)
def test_the_environment_of_data_sets_refuses_the_same(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(msgspec.json.encode([{"prompt": "q", "answer": value}]))
    with pytest.raises(ConfigError, match=r"row 1: its answer is .*(Mend it: |Set )"):
        Dataset(path=str(path))


def test_a_number_of_a_data_set_is_the_answer_as_a_person_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "q", "answer": 18.0}\n')
    assert Dataset(path=str(path)).task(0).task["answer"] == "18"
