"""Programs in the ways in which models write them.

A line of `code_formats.jsonl` is [what it is, completion, program], null where there is no program.
"""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from lachesis.pipeline.scorer.answers.program import program_in
from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.scorer.raters.code import CodeRater
from lachesis.pipeline.tasks.assertions import called_names
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "completion",
    ["```" * 100_000, "```\n" * 50_000, "```python\n" * 30_000, "> " * 100_000 + "```", "~~~\n```\n" * 30_000,
     "```python\n" + "(" * 60_000, "```python\n" + "-" * 60_000 + "1", "```python\n" + "lambda:" * 8_000 + "1",
     "<answer>" * 50_000, "a ```\n" * 30_000, "```markdown\n" * 20_000 + "```\n" * 20_000, " " * 60_000 + "```\nx=1\n",
     "```\n" + "\t" * 60_000 + "x"],
)  # fmt: skip
def test_hostile_text_is_read_before_the_time_limit_of_a_test(completion: str) -> None:
    program_in(completion)


PACKED = base64.b64encode(zlib.compress(b"x" * 100)).decode()
DOUBLED = [{"input": "4", "output": "8"}, {"input": "5", "output": "10"}]


@pytest.mark.parametrize(
    ("written", "tests"),
    [
        (DOUBLED, DOUBLED),
        (json.dumps(DOUBLED), DOUBLED),
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
        ({"fn_name": "f"}, "calls 'f' with None"),
        ({"fn_name": "f(1)", "inputs": [[1]], "outputs": [2]}, "no name of one"),
        ({"fn_name": "f", "inputs": [1], "outputs": [2]}, "calls 'f' with 1"),
        ([{"fn_name": "f", "input": "1,", "output": "2"}], "no JSON"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "'functional' and names no function"),
        (PACKED, "packed .*pickle.*as JSON"),
        ("def check(candidate):\n    assert candidate(1)", "give entry_point beside it"),
        (["f(1) == 2"], "asserts nothing"),
        (["x = f(1)"], "asserts nothing"),
        (["assert f(1) = 2"], "no program could pass"),
        (json.dumps(DOUBLED[0])[1:-1], "no program could pass"),
        ("import pytest\n@pytest.mark.parametrize('a', [1])\ndef test_f(a):\n    assert f(a)", "written for pytest"),
        ({"inputs": [[1, 2]], "outputs": ["2"]}, "a test of code has"),
    ],
)
def test_other_tests_are_refused(written: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        program_tests(written)


CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
CASE = (
    "import unittest\n\n\nclass Case(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add(1, 2), 3)\n"
)
RUN = [
    ({"tests": {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}}, 2),
    ({"tests": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]})}, 1),  # so APPS writes it
    ({"tests": '[{"input": "1\\n2", "output": "3", "testtype": "functional"}]', "metadata": '{"func_name": "add"}'}, 1),
    ({"tests": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]}, 1),
    ({"tests": CHECK, "entry_point": "add"}, 1),
    ({"tests": {"prompt": "def add(a, b):", "test": CHECK, "entry_point": "add"}}, 1),
    ({"tests": {"test_list": ["assert add(x, 2) == 3"], "test_setup_code": "x = 1"}}, 1),
    ({"tests": "['assert add(1, 2) == 3', 'assert add(1, 1) == 2']"}, 2),
    ({"tests": CASE}, 1),
    ({"tests": f"{CASE}\n\nif __name__ == '__main__':\n    unittest.main()\n"}, 1),
    ({"tests": "from solution import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"}, 1),
]


@pytest.mark.outside
@pytest.mark.parametrize(("task", "number"), RUN)
async def test_the_tests_of_data_sets_tell_right_from_wrong(task: dict[str, Any], number: int) -> None:
    rater = CodeRater(time_s=60, total_s=120, memory_mb=256)
    right, wrong = (f"```python\ndef add(a, b):\n    return a {sign} b\n```" for sign in "+-")
    assert await rater.rate(Sample(prompt="", completion=right, task=task)) == 1.0
    assert await rater.rate(Sample(prompt="", completion=wrong, task=task)) == 0.0
    read = program_tests(task["tests"], task)
    assert len(read) == number
    assert program_tests(read, task) == read


@pytest.mark.outside
async def test_a_method_and_the_imports_of_a_prompt_are_found() -> None:
    rater = CodeRater(time_s=60, total_s=120, memory_mb=256)
    method = "```python\nclass Solution:\n    def add(self, a: List[int], b):\n        return [*a, b]\n```"
    begun = {"prompt": "from typing import List\n\ndef add(a, b):\n", "entry_point": "Solution().add"}
    check = "def check(candidate):\n    assert candidate([1], 2) == [1, 2]\n"
    assert await rater.rate(Sample(prompt="", completion=method, task={"tests": check, **begun})) == 1.0
    called = {"fn_name": "Solution().add", "inputs": [[[1], 2]], "outputs": [[1, 2]]}
    plain = method.replace(": List[int]", "")
    assert await rater.rate(Sample(prompt="", completion=plain, task={"tests": called})) == 1.0


@pytest.mark.outside
async def test_a_called_function_has_the_imports_that_judges_of_data_sets_give() -> None:
    rater = CodeRater(time_s=60, total_s=120, memory_mb=256)
    body = "    def f(self, a: List[int], m) -> Optional[int]:\n        return pow(len(Counter(a)), heappop(a), m)"
    test = [{"input": "[3, 4]\n5", "output": "3", "testtype": "functional"}]
    task = {"tests": json.dumps(test), "metadata": json.dumps({"func_name": "f"})}
    for before in ("", "from __future__ import annotations\nfrom collections import *\nfrom heapq import *\n"):
        completion = f"```python\n{before}class Solution:\n{body}\n```"
        assert await rater.rate(Sample(prompt="", completion=completion, task=task)) == 1.0


@pytest.mark.outside
async def test_a_block_that_reads_the_input_goes_on_with_the_function_before_it() -> None:
    rater = CodeRater(time_s=60, total_s=120, memory_mb=256)
    function, reading, demo = "def f(x):\n    return x * 2", "print(f(int(input())))", "print(f(3))"
    task = {"tests": [{"input": "4", "output": "8"}]}
    for blocks, score in (
        ((function, reading), 1.0),
        ((f"{function}\n{reading}", demo), 1.0),
        ((f"{function}\n{reading}", reading), 1.0),
        ((function, demo), 0.0),
    ):
        completion = "\n".join(f"Then:\n```python\n{block}\n```" for block in blocks)
        assert await rater.rate(Sample(prompt="", completion=completion, task=task)) == score


@pytest.mark.outside
async def test_a_test_that_imports_what_the_sandbox_lacks_is_refused() -> None:
    task = {"tests": "import numpy\nassert f(1) == 2"}
    sample = Sample(prompt="", completion="```python\ndef f(x): return x + 1\n```", task=task)
    with pytest.raises(DataError, match=r"imports 'numpy'.*packages = true"):
        await CodeRater().rate(sample)


@pytest.mark.outside
async def test_a_right_program_passes_whatever_stands_around_it() -> None:
    rater = CodeRater(time_s=60, total_s=120, memory_mb=256)
    answer = "First:\n```\n8\n```\n```Python\r\nprint(int(input()) * 2)\r\n```\nOutput:\n```\n8\n```"
    task = {"tests": json.dumps({"inputs": ["4", "5"], "outputs": ["8", "10"]})}
    assert await rater.rate(Sample(prompt="", completion=answer, task=task)) == 1.0
    assert await rater.rate(Sample(prompt="", completion=f"<think>{answer}", task=task)) == 0.0
    with pytest.raises(DataError, match=r"item sums-7: .*calls 'f' with None"):
        await rater.rate(Sample(prompt="", completion=answer, task={"tests": {"fn_name": "f"}}, item="sums-7"))


READS = "n = int(input())\nprint(n * 2)"
DOUBLES = "def f(x):\n    return x * 2"
EXAMPLES = [
    "x = 3\nprint(x * 2)", "%timeit f(2)", "$ python sol.py", "!pip install x", "f(2)  →  4", "print(f(", "4\n6",
    "Traceback (most recent call last):\nTypeError: x", "from my_module import f\nprint(f(2))",
    "import timeit\nprint(timeit.timeit('f(2)', globals=globals()))", "def brute(x):\n    return sum([x, x])",
    "for i in range(3):\n    print(i, i * 2)", "class Node:\n    pass", "def f(x: int) -> int:\n    ...",
    "import random\nprint(random.randint(1, 10))", "with open('sol.py') as source:\n    print(source.read())",
    "import unittest\nfrom m import f\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertTrue(f(2))",
    "import subprocess\nprint(subprocess.run(['python', 'sol.py'], text=True).stdout)",
]  # fmt: skip


@pytest.mark.parametrize("label", ["python", ""])
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_behind_the_program_is_not_the_program(example: str, label: str) -> None:
    """What the tests need says which block is meant."""
    for program in (
        READS,
        READS.replace("input()", "open(0).read()"),
        "import fileinput\nfor line in fileinput.input():\n    print(int(line) * 2)",
    ):
        completion = f"```{label}\n{program}\n```\nFor example:\n```{label}\n{example}\n```\n"
        assert program_in(completion, for_input=True) == program
    for tests in (
        ["assert f(2) == 4"],
        ["import math\nx = 2\nassert math.isclose(f(x), 4)"],
        [{"fn_name": "f", "input": [2], "output": 4}],
        ["from solution import f\nassert f(2) == 4"],
    ):
        called = called_names(program_tests(tests)[0]["assert"])
        completion = f"```{label}\n{DOUBLES}\n```\nFor example:\n```{label}\n{example}\n```\n"
        assert program_in(completion, called=called) == DOUBLES


def test_the_last_program_that_the_tests_can_use_is_meant() -> None:
    newer = "def f(x):\n    return x << 1"
    broken = "def f(x):\n    retrun x"
    for last in (newer, broken):
        completion = f"```python\n{DOUBLES}\n```\nBetter:\n```python\n{last}\n```\n"
        assert program_in(completion, called={"f"}) == last
    helped = "```python\ndef g(x):\n    return 2 * x\n```\n```python\ndef f(x):\n    return g(x)\n```\n"
    assert "def g" in str(program_in(helped, called={"f"}))
    assert program_in("```python\nprint(8)\n```", for_input=True, called={"f"}) == "print(8)"


@pytest.mark.outside
async def test_a_program_with_an_example_behind_it_passes() -> None:
    rater = CodeRater(required=())
    for program, tests in ((READS, DOUBLED), (DOUBLES, ["assert f(2) == 4"])):
        completion = f"```python\n{program}\n```\nFor 3 it is\n```python\nx = 3\nprint(x * 2)\n```\n"
        assert await rater.rate(Sample(prompt="", completion=completion, task={"tests": tests})) == 1.0
