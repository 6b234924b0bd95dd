"""Multiple-choice questions as public data sets have them, truth values, dictionaries, and shards with an index."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lachesis.pipeline.environment.dataset import Dataset
from lachesis.pipeline.tasks import row_index, rows
from lachesis.pipeline.tasks.choices import find_right_choices, read_choices
from lachesis.schemas.errors import ConfigError

FOUR = ["red", "green", "blue", "grey"]
GPQA = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2"]


def made(folder: Path, rows: list[dict[str, Any]], **params: Any) -> Dataset:
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return Dataset(path=str(path), prompt="question", **params)


def first(env: Dataset) -> tuple[str, Any]:
    task = env.task(0)
    return task.messages[-1].content, task.task.get("answer")


@pytest.mark.parametrize(
    ("columns", "params"),
    [
        ({"choices": FOUR, "answer": 1}, {"choices": "choices"}),  # MMLU
        ({"options": FOUR, "answer": "B", "answer_index": 1}, {"choices": "options"}),  # MMLU-Pro, RACE
        ({"endings": FOUR, "label": "1"}, {"choices": "endings", "answer": "label"}),  # HellaSwag
        (
            {"choices": {"text": FOUR, "label": ["1", "2", "3", "4"]}, "answerKey": "2"},  # ARC, CommonsenseQA
            {"choices": "choices", "answer": "answerKey"},
        ),
        ({"options": {"A": "red", "B": "green", "C": "blue", "D": "grey"}, "answer": "green"}, {"choices": "options"}),
        (
            {"options": ["(A)red", "(B)green", "(C)blue", "(D)grey"], "label": "B"},  # AGIEval
            {"choices": "options", "answer": "label"},
        ),
        (
            {"mc1_targets": {"choices": FOUR, "labels": [0, 1, 0, 0]}},  # TruthfulQA
            {"choices": "mc1_targets", "answer": "mc1_targets.labels"},
        ),
        ({"a": "red", "b": "green", "c": "blue", "d": "grey", "e": None, "cop": 1},  # MedMCQA
         {"choices": ["a", "b", "c", "d", "e"], "answer": "cop"}),
        ({"choices": [{"label": "A", "text": one} for one in FOUR], "answer": "green"}, {"choices": "choices"}),
        ({"choices": json.dumps(FOUR), "answer": 1.0}, {"choices": "choices"}),
    ],
)  # fmt: skip
def test_choices_are_asked_under_letters(tmp_path: Path, columns: dict[str, Any], params: dict[str, Any]) -> None:
    env = made(tmp_path, [{"question": "which?"} | columns], **params)
    assert first(env) == ("which?\n\nA. red\nB. green\nC. blue\nD. grey", "B")
    assert env.task(0).task["choices"] == FOUR


def test_a_template_shows_the_choices_where_it_names_them(tmp_path: Path) -> None:
    row = {"question": "which?", "options": FOUR, "answer": 1}
    for name in ("choices", "options"):
        env = made(tmp_path, [row], choices="options", template="{question}\n{" + name + "}\nUse \\boxed{}.")
        assert first(env)[0] == "which?\nA. red\nB. green\nC. blue\nD. grey\nUse \\boxed{}."
    env = made(tmp_path, [row], choices="options", template="Q: {question}")
    assert first(env)[0] == "Q: which?\n\nA. red\nB. green\nC. blue\nD. grey"


def test_choices_are_shuffled_where_their_order_tells_the_answer(tmp_path: Path) -> None:
    rows = [
        {"question": f"{i}?", GPQA[0]: f"{i} kg", GPQA[1]: f"{i + 1} kg", GPQA[2]: f"{i + 2} kg"} for i in range(60)
    ]
    env = made(tmp_path, rows, choices=GPQA, answer=GPQA[0])
    tasks = [env.task(i) for i in range(60)]
    assert {task.task["answer"] for task in tasks} == {"A", "B", "C"}
    for i, task in enumerate(tasks):
        assert f"{task.task['answer']}. {i} kg\n" in task.messages[0].content + "\n"
    again = made(
        tmp_path,
        [{name: row[name] for name in reversed(row)} for row in rows[::-1]],
        choices=GPQA[::-1],
        answer=GPQA[0],
    )
    assert {task.item for task in tasks} == {again.task(i).item for i in range(60)}
    with pytest.raises(ConfigError, match="tells the answer"):
        made(
            tmp_path,
            rows,
            choices=GPQA,
            answer=GPQA[0],
            template="{question} " + " ".join(f"{{{one}}}" for one in GPQA),
        )
    with pytest.raises(ConfigError, match="leave answer_form out"):  # a letter would mean a place in the shuffled order
        made(tmp_path, rows, choices=GPQA, answer=GPQA[0], answer_form="label")


def test_answers_that_count_from_one_are_refused_until_it_is_said(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "option1": "John", "option2": "Mary", "answer": str(1 + i % 2)} for i in range(4)]
    with pytest.raises(ConfigError, match='answer_form = "number"'):
        made(tmp_path, rows, choices=["option1", "option2"])
    env = made(tmp_path, rows, choices=["option1", "option2"], answer_form="number")
    assert [env.task(i).task["answer"] for i in range(4)] == ["A", "B", "A", "B"]


@pytest.mark.parametrize(
    ("choices", "answer", "why"),
    [
        (["2", "4", "1"], "2", "may be the text of one or the index of one"),
        ([1, 2, 3], 2, "may be the text of one or the index of one"),
        (FOUR, 4, "answer_form"),
        (FOUR, "E", "none of its choices"),
        (FOUR, True, "none of its choices"),
        (FOUR, [0, 0, 0, 0], "names none"),
        (["red", "red"], "red", "2 of its choices are that"),
        (["red"], 0, "2 to 26"),
        (["red", "", "blue"], 0, "one of its choices is ''"),
        ("a ) 38 , b ) 27", "a", "leave `choices` out"),
    ],
)
def test_what_could_mean_two_choices_is_refused(tmp_path: Path, choices: Any, answer: Any, why: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "which?", "choices": choices, "answer": answer}))
    with pytest.raises(ConfigError, match=why):
        Dataset(path=str(path), prompt="question", choices="choices")


def test_texts_that_begin_with_numbers_have_no_labels() -> None:
    choices = read_choices(["1.5", "2.5", "3.5"], "")
    assert [one.text for one in choices] == ["1.5", "2.5", "3.5"]
    assert find_right_choices("2.5", choices, None, "") == [1]
    assert find_right_choices([0, 2], read_choices(FOUR, ""), None, "") == [0, 2]


def test_choices_that_the_model_does_not_see_and_a_letter_that_is_always_right_are_told(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "choices": FOUR, "answer": 1} for i in range(20)]
    assert any('give choices = "choices"' in doubt for doubt in made(tmp_path, rows).doubts)
    (doubt,) = made(tmp_path, rows, choices="choices").doubts
    assert "the right choice of all 20 rows is B" in doubt


def test_the_same_question_with_other_choices_is_another_task(tmp_path: Path) -> None:
    rows = [{"question": "which?", "choices": [one, "x"], "answer": 0} for one in FOUR]
    env = made(tmp_path, rows, choices="choices", template="{question}")
    assert len(env) == len(set(env.item_keys().tolist())) == 4


def test_truth_values_and_labels_need_words(tmp_path: Path) -> None:
    rows = [{"question": "even?", "answer": True}, {"question": "odd?", "answer": False}]
    with pytest.raises(ConfigError, match="answer_words"):
        made(tmp_path, rows)
    env = made(tmp_path, rows, answer_words={"true": "yes", "false": "no"})
    assert [env.task(i).task["answer"] for i in range(2)] == ["yes", "no"]
    news = made(tmp_path, [{"question": "n", "label": 1}], answer="label", answer_words={"1": "Sports"})
    assert news.task(0).task["answer"] == "Sports"
    with pytest.raises(ConfigError, match="no word, only for '0'"):
        made(tmp_path, [{"question": "n", "label": 1}], answer="label", answer_words={"0": "World"})


def test_a_dictionary_as_answer_names_what_to_set(tmp_path: Path) -> None:
    row = {"question": "who?", "answers": {"text": ["Bob", "Bobby"], "answer_start": [3, 9]}}
    with pytest.raises(ConfigError, match=r'"answers\.text", "answers\.answer_start".*task = \{ truth = "answers" \}'):
        made(tmp_path, [row], answer="answers")
    assert made(tmp_path, [row], answer="answers.text").task(0).task["answer"] == ["Bob", "Bobby"]


def test_the_index_of_shards_is_kept_as_that_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_index, "_LARGE_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "shards"
    folder.mkdir()
    for part in range(3):
        lines = [json.dumps({"prompt": f"{part}/{i}?", "answer": i}) for i in range(5)]
        (folder / f"part-{part}.jsonl").write_text("\n".join([*lines, lines[0]]) + "\n")
    (folder / "part-1.jsonl").write_text('{"prompt": "", "answer": 1}\n' + (folder / "part-1.jsonl").read_text())
    one = Dataset(path=str(folder))
    assert "row 1 of" in one.doubts[0]

    def fail(*_: object) -> None:
        raise AssertionError("looked through again")

    with monkeypatch.context() as patched:
        patched.setattr(Dataset, "_look_through", fail)
        patched.setattr(rows.LineRows, "_find_lines", fail)
        two = Dataset(path=str(folder))
    assert two.doubts == one.doubts
    assert [two.task(i) for i in range(len(two))] == [one.task(i) for i in range(15)]
    (folder / "part-2.jsonl").write_text('{"prompt": "new", "answer": 1}\n')
    assert len(Dataset(path=str(folder))) == 11
    (folder / "part-2.jsonl").unlink()
    assert len(Dataset(path=str(folder))) == 10
