"""Programs in the ways in which models write them.

A line of `code_formats.jsonl` is [what it is, completion, program], null where there is no program.
"""

import json
from pathlib import Path

import pytest

from lachesis.pipeline.scoring.rater import Sample
from lachesis.pipeline.scoring.raters.code import CodeRater
from lachesis.pipeline.scoring.raters.fences import program_in
from lachesis.pipeline.tasks.program_tests import program_tests
from lachesis.schemas.errors import ConfigError, DataError

FORMATS = [
    json.loads(line) for line in Path(__file__).with_name("code_formats.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize(("completion", "program"), [one[1:] for one in FORMATS], ids=[one[0] for one in FORMATS])
def test_the_program_is_found(completion: str, program: str | None) -> None:
    found = program_in(completion)
    assert (found and found.strip("\n")) == (program and program.strip("\n"))


def test_there_are_a_hundred_formats() -> None:
    assert len(FORMATS) > 100


@pytest.mark.parametrize(
    "completion",
    ["```" * 100_000, "```\n" * 50_000, "```python\n" * 30_000, "> " * 100_000 + "```", "~~~\n```\n" * 30_000,
     "```python\n" + "(" * 60_000, "```python\n" + "-" * 60_000 + "1", "```python\n" + "lambda:" * 8_000 + "1",
     "<answer>" * 50_000, "a ```\n" * 30_000, "```markdown\n" * 20_000 + "```\n" * 20_000, " " * 60_000 + "```\nx=1\n",
     "```\n" + "\t" * 60_000 + "x"],
)  # fmt: skip
def test_hostile_text_is_read_before_the_time_limit_of_a_test(completion: str) -> None:
    program_in(completion)


DOUBLED = [{"input": "4", "output": "8"}, {"input": "5", "output": "10"}]


@pytest.mark.parametrize(
    ("written", "tests"),
    [
        (DOUBLED, DOUBLED),
        (json.dumps(DOUBLED), DOUBLED),
        ([json.dumps(DOUBLED[0])[1:-1]], [{"assert": '"input": "4", "output": "8"'}]),
        ({"inputs": ["4", "5"], "outputs": ["8", "10"]}, DOUBLED),
        (json.dumps({"input": ["4", "5"], "output": ["8", "10"]}), DOUBLED),
        ([{"stdin": "4", "expected_output": "8"}], DOUBLED[:1]),
        ([{"input": ["4", "5"], "output": ["8"]}], [{"input": "4\n5", "output": "8"}]),
        ({"input": "4", "output": "8"}, DOUBLED[:1]),
        ([{"output": "8"}], [{"input": "", "output": "8"}]),
        (["assert f(1) == 2", "assert f(2) == 3"], [{"assert": "assert f(1) == 2"}, {"assert": "assert f(2) == 3"}]),
        (
            "def check(f):\n    assert f(1) == 2\ncheck(g)",
            [{"assert": "def check(f):\n    assert f(1) == 2\ncheck(g)"}],
        ),
        ([{"assert": "assert f(1) == 2"}], [{"assert": "assert f(1) == 2"}]),
    ],
)
def test_tests_are_read_in_the_forms_of_data_sets(written: object, tests: list[dict[str, str]]) -> None:
    assert program_tests(written) == tests


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ([], "a list of 1 to 4096"),
        (7, "a list of 1 to 4096"),
        ([7], "a test of code has"),
        ([{"expected": "8"}], "a test of code has"),
        ([{"input": "4", "output": 8}], "a test of code has"),
        ({"inputs": ["4"], "outputs": ["8", "10"]}, "1 inputs and 2 outputs"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [2]}, "call the function 'f' by name"),
        ({"inputs": [[1, 2]], "outputs": ["2"]}, "a test of code has"),
    ],
)
def test_other_tests_are_refused(written: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        program_tests(written)


async def test_a_right_program_passes_whatever_stands_around_it() -> None:
    rater = CodeRater(time_s=1, total_s=2, memory_mb=256)
    answer = "First:\n```\n8\n```\n```Python\r\nprint(int(input()) * 2)\r\n```\nOutput:\n```\n8\n```"
    task = {"tests": json.dumps({"inputs": ["4", "5"], "outputs": ["8", "10"]})}
    assert await rater.rate(Sample(prompt="", completion=answer, task=task)) == 1.0
    assert await rater.rate(Sample(prompt="", completion=f"<think>{answer}", task=task)) == 0.0
    with pytest.raises(DataError, match=r"item sums-7: .*by name"):
        await rater.rate(Sample(prompt="", completion=answer, task={"tests": {"fn_name": "f"}}, item="sums-7"))
