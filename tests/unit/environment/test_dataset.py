"""Data sets as environments: every kind of file, prompts and answers in all their forms, errors that name the row."""

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lachesis.pipeline.environment.dataset import Dataset
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.tasks import rows
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

ROWS = [
    {"question": f"What is {n}+1?", "answer": str(n + 1), "kind": "odd" if n % 2 else "even", "hard": n}
    for n in range(6)
]
SAMPLE = Path(__file__).parents[2] / "examples" / "word_problems.jsonl"


def written(folder: Path, ending: str, table: list[dict]) -> str:
    path = folder / f"data.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in table))
    elif ending == "json":
        path.write_text(json.dumps(table))
    elif ending == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows(table)
    else:
        pq.write_table(pa.Table.from_pylist(table), path)
    return str(path)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_tasks(tmp_path: Path, ending: str) -> None:
    params = {"prompt": "question", "skill": "kind", "difficulty": "hard", "metadata": ["kind"]}
    env = load_environment("dataset", {"path": written(tmp_path, ending, ROWS), **params})
    assert len(env) == 6
    for n, row in enumerate(ROWS):
        task = env.task(n)
        assert task.messages == [Message(role="user", content=row["question"])]
        assert task.task == {"answer": row["answer"], "metadata": {"kind": row["kind"]}}
        assert (task.skill, task.difficulty) == (row["kind"], float(n))
    assert len({env.task(n).item for n in range(6)}) == 6


def test_items_keep_their_names_in_another_order_and_a_prompt_occurs_once(tmp_path: Path) -> None:
    first = Dataset(path=written(tmp_path, "json", ROWS), prompt="question")
    names = {first.task(n).messages[0].content: first.task(n).item for n in range(6)}
    other = Dataset(path=written(tmp_path, "json", [*reversed(ROWS), *ROWS]), prompt="question")
    assert {other.task(n).messages[0].content: other.task(n).item for n in range(len(other))} == names
    assert len(Dataset(path=written(tmp_path, "json", ROWS), prompt="question", size=2)) == 2


async def test_a_data_set_of_the_shape_of_gsm8k_is_judged_by_its_numbers() -> None:
    env = Dataset(path=str(SAMPLE), prompt="question", answer_after="####", system="Answer with a number.")
    assert len(env) == 24
    for n, row in enumerate(map(json.loads, SAMPLE.read_text().splitlines())):
        task = env.task(n)
        assert [message.role for message in task.messages] == ["system", "user"]
        assert task.task["answer"] == row["answer"].rpartition("#### ")[2]
        left, _, right = row["answer"].rpartition("####")[0].rpartition(". ")[2].partition("=")
        assert eval(left) == int(right.strip().rstrip(".")) == int(task.task["answer"])  # noqa: S307 - our own sample


def test_a_template_takes_columns_and_a_prompt_may_be_a_chat(tmp_path: Path) -> None:
    env = Dataset(path=written(tmp_path, "json", ROWS), template="{question} ({kind})\nA number.")
    assert env.task(1).messages[0].content == "What is 1+1? (odd)\nA number."
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    env = Dataset(path=written(tmp_path, "json", [{"prompt": chat}]), answer=None, system="s")
    assert [message.content for message in env.task(0).messages] == ["s", "a", "b", "c"]
    assert env.task(0).task == {}


@pytest.mark.parametrize(
    ("table", "params", "words"),
    [
        (ROWS, {"prompt": "qestion"}, "row 1: it has no column 'qestion'.*'question'"),
        (ROWS, {"prompt": "question", "skill": "sort"}, "no column 'sort'"),
        (ROWS, {"prompt": "question", "difficulty": "kind"}, "row 1: its difficulty 'even' is no number"),
        (ROWS, {"template": "{qestion}"}, "template: it has no column 'qestion'"),
        (ROWS, {"template": "{question"}, "cannot be filled"),
        (ROWS, {"prompt": "question", "answer_after": "####"}, "row 1: no answer follows '####'"),
        ([{"prompt": "  ", "answer": "1"}], {}, "neither text nor chat messages"),
        ([{"prompt": [], "answer": "1"}], {}, "its prompt is empty"),
        ([{"prompt": "a", "answer": None}], {}, "row 1: its answer is None"),
        ([{"prompt": "a", "answer": [["1"]]}], {}, "its answer is"),
        ([{"prompt": "a", "answer": []}], {}, "its answer is"),
        ([], {}, "it has no rows"),
    ],
)
def test_what_does_not_fit_is_named_with_its_row(tmp_path: Path, table: list, params: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Dataset(path=written(tmp_path, "json", table), **params)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, "No such file"),
        ("data.txt", b"", "must end in .jsonl, .json, .csv, .parquet"),
        ("data.jsonl", b'{"prompt": "a", "answer": "1"}\n{"prompt"', "line 2"),
        ("data.jsonl", b"[1]", "line 1"),
        ("data.jsonl", b'{"prompt": "\xff"}', "line 1"),
        ("data.json", b"{}", "no JSON list"),
        ("data.csv", b"prompt,answer\na,1,2\n", "line 2: other columns"),
        ("data.csv", b"prompt,answer\n\xff,1\n", "decode"),
        ("data.parquet", b"PAR1 no", "data.parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        Dataset(path=str(tmp_path / name))


def test_either_a_file_or_a_name() -> None:
    for given in ({}, {"path": "a.jsonl", "name": "b"}):
        with pytest.raises(ConfigError, match="either path"):
            Dataset(**given)


def test_a_named_data_set_is_loaded_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(StartupError, match="needs the package 'datasets': pip install datasets"):
        Dataset(name="org/data", subset="main")
    asked = []

    def load_dataset(name: str, subset: str | None, split: str) -> list[dict]:
        asked.append((name, subset, split))
        if split == "none":
            raise ValueError("Unknown split")
        return ROWS

    # a fake: the package is not among this project's requirements
    monkeypatch.setattr(rows, "_imported", lambda *_: SimpleNamespace(load_dataset=load_dataset))
    assert len(Dataset(name="org/data", subset="main", split="test", prompt="question")) == 6
    assert asked == [("org/data", "main", "test")]
    with pytest.raises(ConfigError, match="split 'none': ValueError: Unknown split"):
        Dataset(name="org/data", split="none")


def test_a_column_of_tests_is_what_the_rater_of_code_runs(tmp_path):
    file = tmp_path / "programs.jsonl"
    tests = [{"input": "4", "output": "8"}]
    rows = [{"prompt": "Double it.", "cases": json.dumps(tests)}, {"prompt": "Again.", "cases": tests}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for given in ({}, {"answer": None}, {"answer": ""}):
        made = Dataset(path=str(file), tests="cases", **given)
        assert [made.task(i).task for i in range(2)] == [{"tests": tests}] * 2
    with pytest.raises(ConfigError, match="no column 'reply'"):
        Dataset(path=str(file), answer="reply", tests="cases")
    made = Dataset(path=str(file), answer=None, tests="cases")
    assert [made.task(i).task for i in range(2)] == [{"tests": tests}] * 2
    with pytest.raises(ConfigError, match=r"row 1.*cases"):
        Dataset(path=str(file), answer=None, tests="case")
    file.write_text(json.dumps({"prompt": "x", "cases": 3}))
    with pytest.raises(ConfigError, match="row 1: tests of code are a list"):
        Dataset(path=str(file), answer=None, tests="cases")
