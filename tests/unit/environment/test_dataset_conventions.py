"""Data sets as people have them: the layouts of other projects, and files of pandas, spreadsheets and Windows."""

import bz2
import csv
import gzip
import json
import logging
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lachesis.pipeline.environment.dataset import Dataset
from lachesis.pipeline.tasks import row_index
from lachesis.schemas.errors import ConfigError

PAIRS = [{"prompt": "six and six?", "answer": "12"}, {"prompt": "nine and nine?", "answer": "18"}]


def made(folder: Path, rows: list, **params) -> Dataset:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Dataset(path=str(path), **params)


def said(env: Dataset, index: int = 0) -> list[tuple[str, str]]:
    return [(one.role, one.content) for one in env.task(index).messages]


# layouts


def test_the_layout_of_verl(tmp_path: Path) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"index": 3, "split": "train", "level": 4},
    }
    path = tmp_path / "verl.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    env = Dataset(
        path=str(path), answer="reward_model.ground_truth", skill="data_source", difficulty="extra_info.level",
        task={"index": "extra_info.index"}, metadata=["extra_info.split"],
    )  # fmt: skip
    task = env.task(0)
    assert said(env) == [("system", "s"), ("user", "q")]
    assert task.task == {"answer": "72", "index": 3, "metadata": {"extra_info.split": "train"}}
    assert (task.skill, task.difficulty) == ("gsm8k", 4.0)


def test_the_layout_of_nemo_gym_and_columns_as_json_text(tmp_path: Path) -> None:
    asked = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "q"}]}], "instructions": "i"}
    for given in (asked, json.dumps(asked)):
        row = {"responses_create_params": given, "expected_answer": 7}
        env = made(tmp_path, [row], prompt="responses_create_params.input", answer="expected_answer")
        assert said(env) == [("user", "q")]
    env = made(
        tmp_path, [row | {"responses_create_params": asked}], prompt="responses_create_params", answer="expected_answer"
    )
    assert said(env) == [("system", "i"), ("user", "q")]
    assert env.task(0).task == {"answer": "7"}


def test_sharegpts_turns_and_completions(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
        {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"},
    ]  # fmt: skip
    env = made(tmp_path, [{"conversations": turns}], prompt="conversations")
    assert said(env) == [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    assert env.task(0).task["answer"] == "d"
    env = made(
        tmp_path,
        [{"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "x"}]}],
        answer="completion",
    )
    assert env.task(0).task["answer"] == "x"


CHOSEN = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}]
POPULAR: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]], dict[str, Any]]] = {
    "Alpaca": (
        {"instruction": "Classify.", "input": "Tiger", "output": "mammal", "text": "### Response:"},
        {"template": "{instruction}\n{input}", "answer": "output"},
        [("user", "Classify.\nTiger")],
        {"answer": "mammal"},
    ),
    "Alpaca without an input": (
        {"instruction": "Give tips.", "input": "", "output": "Eat well."},
        {"template": "{instruction}\n{input}", "answer": "output"},
        [("user", "Give tips.")],
        {"answer": "Eat well."},
    ),
    "Dolly as pandas writes it": (
        {"instruction": "Name a fish.", "context": None, "response": "Tope", "category": "qa"},
        {"template": "{instruction}\n{context}", "answer": "response"},
        [("user", "Name a fish.")],
        {"answer": "Tope"},
    ),
    "HH-RLHF": (
        {"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d", "rejected": "-"},
        {"prompt": "chosen"},
        [("user", "a"), ("assistant", "b"), ("user", "c")],
        {"answer": "d"},
    ),
    "a prompt of HH-RLHF, and its answer in the whole": (
        {"prompt": "\n\nHuman: a\n\nAssistant:", "chosen": "\n\nHuman: a\n\nAssistant: b"},
        {"answer": "chosen"},
        [("user", "a")],
        {"answer": "b"},
    ),
    "UltraFeedback, binarized": (
        {"prompt": "q", "chosen": CHOSEN, "rejected": CHOSEN, "messages": CHOSEN, "score_chosen": 8.5},
        {"answer": "chosen"},
        [("user", "q")],
        {"answer": "good"},
    ),
    "UltraFeedback": (
        {"instruction": "q", "completions": [{"response": "r", "overall_score": 8.5}], "correct_answers": ["None"]},
        {"prompt": "instruction", "answer": "completions.0.response"},
        [("user", "q")],
        {"answer": "r"},
    ),
    "HelpSteer": (
        {"prompt": "c#", "response": "A language", "helpfulness": 3, "verbosity": 2},
        {"answer": "response", "task": ["helpfulness"]},
        [("user", "c#")],
        {"answer": "A language", "helpfulness": 3},
    ),
    "tulu": (
        {"messages": [{"role": "user", "content": "2+2?"}], "ground_truth": "4", "dataset": "gsm8k"},
        {"prompt": "messages", "answer": "ground_truth", "metadata": ["dataset"]},
        [("user", "2+2?")],
        {"answer": "4", "metadata": {"dataset": "gsm8k"}},
    ),
    "Open-Reasoner-Zero": (
        {"0": {"from": "human", "value": "1+1?"}, "1": {"from": "assistant", "ground_truth": {"value": "2"}}},
        {"prompt": "0", "answer": "1.ground_truth.value"},
        [("user", "1+1?")],
        {"answer": "2"},
    ),
    "DAPO": (
        {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "34", "style": "rule"}},
        {"answer": "reward_model.ground_truth"},
        [("user", "q")],
        {"answer": "34"},
    ),
    "TriviaQA": (
        {"question": "Who?", "answer": {"aliases": ["D. S.", "Dave"], "value": "David"}},
        {"prompt": "question", "answer": "answer.aliases"},
        [("user", "Who?")],
        {"answer": ["D. S.", "Dave"]},
    ),
    "OpenOrca": (
        {"system_prompt": "Be brief.", "question": "q", "response": "r"},
        {"prompt": "question", "answer": "response", "system": "{system_prompt}"},
        [("system", "Be brief."), ("user", "q")],
        {"answer": "r"},
    ),
}


@pytest.mark.parametrize(("row", "params", "asked", "task"), POPULAR.values(), ids=POPULAR)
def test_popular_layouts(tmp_path: Path, row: Any, params: Any, asked: Any, task: Any) -> None:
    env = made(tmp_path, [row], **params)
    assert (said(env), env.task(0).task) == (asked, task)


def test_an_instruction_itself_may_not_be_missing_nor_a_column_of_another_template(tmp_path: Path) -> None:
    rows = [{"instruction": None, "input": "x", "output": "1"}, {"instruction": "i", "input": "x", "output": "1"}]
    env = made(tmp_path, rows, template="{instruction}\n{input}", answer="output")
    assert len(env) == 1
    assert "1 x its 'instruction', of which the template makes the prompt, is missing" in env.doubts[0]
    with pytest.raises(ConfigError, match="its 'input', of which the template makes the prompt, is missing"):
        made(tmp_path, [{"input": None, "answer": "1"}], template="Say {input}.")


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>user\nHi<|im_end|>\n",
        "[INST] Hi [/INST]",
        "### Human: Hi",
        "i\n### Response:\n1",
        "<extra_id_1>User",
    ],
)
def test_prompts_with_the_marks_of_a_chat_template_are_named(tmp_path: Path, prompt: str) -> None:
    env = made(tmp_path, [*PAIRS, {"prompt": prompt, "answer": "1"}])
    assert said(env, 2) == [("user", prompt)]
    assert "1 of 3 prompts hold the marks of a chat template" in env.doubts[0]
    assert made(tmp_path, [*PAIRS, {"prompt": "a < b, [1], <b> and ### Human", "answer": "1"}]).doubts == []


@pytest.mark.parametrize(
    ("answer", "params", "reference"),
    [
        ("<think>9 + 9, so 18?</think>\n18", {}, "18"),
        ("18\u200b", {}, "18"),
        ("True", {"answer_words": {"true": "yes", "false": "no"}}, "yes"),
        ("FALSE", {"answer_words": {"true": "yes", "false": "no"}}, "no"),
        ("Yes", {"answer_words": {"Yes": "1", "yes": "2"}}, "1"),
    ],
)
def test_answers_as_models_and_tables_write_them(tmp_path: Path, answer: Any, params: Any, reference: str) -> None:
    assert made(tmp_path, [{"prompt": "9 + 9?", "answer": answer}], **params).task(0).task["answer"] == reference


def test_a_thought_without_an_answer_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its answer is a thought without an answer behind it: '<think>Let me see"):
        made(tmp_path, [{"prompt": "9 + 9?", "answer": "<think>Let me see"}])


def test_tools_and_pictures_that_the_model_does_not_see_are_named(tmp_path: Path) -> None:
    rows = [{**PAIRS[0], "tools": [{"name": "w"}], "images": []}, {**PAIRS[1], "tools": "[]", "images": ["a.png"]}]
    pictures, tools = made(tmp_path, rows).doubts
    assert "1 of 2 rows have a picture or a recording in the column 'images', which the model does not see" in pictures
    assert "1 of 2 rows have tools in the column 'tools', which the model does not see" in tools


def test_maps_of_parquet_are_objects(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.list_(pa.map_(pa.string(), pa.string())))
    rows = {"prompt": ["a", "b"], "about": pa.array([[("x", [[("y", str(n))]])] for n in range(2)], kind)}
    pq.write_table(pa.table(rows), tmp_path / "maps.parquet")
    env = Dataset(path=str(tmp_path / "maps.parquet"), answer="about.x.0.y")
    assert [env.task(n).task["answer"] for n in range(2)] == ["0", "1"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("https://host/x.jsonl", "data set https://host/x.jsonl: path is a file or folder of this machine, no address"),
        ("/run/hf:/datasets/o/n/x.parquet", 'no address; give name = "OWNER/NAME" instead of path'),
        ("rows.xlsx", ".zst: save the table as CSV"),
        ("rows.tar.gz", ".zst: unpack it"),
        ("rows.arrow", ".zst: write it as Parquet"),
    ],
)
def test_what_is_no_file_of_rows_is_said_with_what_to_do(path: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Dataset(path=path)
    assert said in str(error.value)


def test_a_folder_of_save_to_disk_a_line_that_is_cut_and_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("dataset_info.json", "state.json", "data-00000-of-00001.arrow"):
        (saved / name).write_text("{}")
    with pytest.raises(ConfigError, match="was written by save_to_disk of the package datasets: write it as Parquet"):
        Dataset(path=str(saved))
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "cut.jsonl"
    file.write_text(json.dumps(PAIRS[0]) + '\n{"prompt": "nine and')
    with pytest.raises(ConfigError, match="line 2: Input data was truncated; the line is cut off"):
        Dataset(path="~/cut.jsonl")
    file.write_text(json.dumps(PAIRS[0]))
    assert len(Dataset(path="~/cut.jsonl")) == 1


def test_any_of_several_answers(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "answer": answer} for n, answer in enumerate([["a", "b"], ["a"], [1, 1.0], ["a", None]])]
    env = made(tmp_path, rows)
    assert [env.task(n).task["answer"] for n in range(4)] == [["a", "b"], "a", "1", "a"]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (r"{problem} Put it into \boxed{}.", r"q Put it into \boxed{}."),
        ('{problem} as {"answer": {"value": 1}}', 'q as {"answer": {"value": 1}}'),
        (r"{problem} \frac{a}{b}", r"q \frac{a}{b}"),
        ("{problem} {{x}}", "q {x}"),
        (r"\boxed{{{problem}}} {level.n:.2f} {level.n}", r"\boxed{q} 3.00 3"),
    ],
)
def test_only_columns_are_filled_into_a_template(tmp_path: Path, template: str, text: str) -> None:
    env = made(tmp_path, [{"problem": "q", "answer": "1", "level": {"n": 3.0}}], template=template)
    assert said(env) == [("user", text)]


@pytest.mark.parametrize("place", [0, 1])
def test_a_row_without_a_column_of_the_template_is_left_out(tmp_path: Path, place: int) -> None:
    rows = [{"q": "a", "hint": "h", "answer": "1"}, {"q": "c", "hint": "i", "answer": "3"}]
    rows.insert(place, {"q": "b", "answer": "2"})
    env = made(tmp_path, rows, template="{hint}: {q} \\boxed{}")
    assert [said(env, index)[0][1] for index in range(len(env))] == ["h: a \\boxed{}", "i: c \\boxed{}"]
    assert f"row {place + 1}: it has no column 'hint'" in env.doubts[0]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": "x", "tool_calls": 3}], "answer": "1"},
        {"prompt": [{"role": "user", "content": "x", "tool_calls": "[{"}], "answer": "1"},
        {"prompt": {"instructions": "i", "input": 3}, "answer": "1"},
        {"prompt": "x", "answer": "1", "level": 10**400},
        {"prompt": "x", "answer": "1", "level": float("inf")},
    ],
)
def test_odd_values_leave_out_their_row_alone(tmp_path: Path, row: dict[str, Any]) -> None:
    env = made(tmp_path, [row, {"prompt": "y", "answer": "2", "level": 1}], difficulty="level")
    assert [said(env, index) for index in range(len(env))] == [[("user", "y")]]
    assert "1 of 2 rows are left out" in env.doubts[0]


@pytest.mark.parametrize("data", [[["x", "1"], ["y"]], ["xy", 3], [["x", "1"], None]])
def test_a_frame_with_broken_rows_is_refused(tmp_path: Path, data: list[Any]) -> None:
    path = tmp_path / "frame.json"
    path.write_text(json.dumps({"columns": ["prompt", "answer"], "data": data}))
    with pytest.raises(ConfigError, match="none of pandas' forms"):
        Dataset(path=str(path))


def test_what_a_template_fills_with_braces_in_it_is_not_filled_again(tmp_path: Path) -> None:
    assert said(made(tmp_path, [{"a": "{b}", "b": "x", "answer": "1"}], template="{a}")) == [("user", "{b}")]


@pytest.mark.parametrize(
    ("rows", "params", "words"),
    [
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": "1"}],
            {},
            "a part of type 'image_url'",
        ),
        ([{"prompt": "<image> what?", "images": [1], "answer": "1"}], {}, "a picture"),
        ([{"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}], {}, "nothing but the assistant"),
        ([{"prompt": [{"content": "x"}], "answer": "1"}], {}, "a turn without role"),
        (
            [{"prompt": "q", "reward_model": {"ground_truth": 1}}],
            {"answer": "reward_model.truth"},
            "reward_model.ground_truth",
        ),
        ([{"prompt": "q", "answer": {"target": "1"}}], {}, r"its answer is .*\(dict\)"),
        ([{"prompt": "q", "answer": "1"}], {"task": ["tests"]}, "has a parameter of its own"),
    ],
)
def test_what_would_be_lost_or_is_not_there_is_refused(tmp_path: Path, rows: list, params: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(tmp_path, rows, **params)


def test_names_and_numbers_as_data_sets_write_them(tmp_path: Path) -> None:
    """MATH's levels, Tuelu's sources in a list, and what data frames print for a missing value."""
    given = [("Level 5", ["math"]), ("Level 2", "nan"), (3, ""), ("level_1.5", ["a", "b"]), ("4", None)]
    rows = [{"prompt": str(n), "answer": "1", "level": one, "type": two} for n, (one, two) in enumerate(given)]
    env = made(tmp_path, [*rows, {"prompt": "x", "answer": "1", "level": "Level ?", "type": "t"}],
               difficulty="level", skill="type")  # fmt: skip
    tasks = [env.task(n) for n in range(len(env))]
    assert [task.difficulty for task in tasks] == [5.0, 2.0, 3.0, 1.5, 4.0]
    assert [task.skill for task in tasks] == ["math", None, None, "['a', 'b']", None]
    assert "1 of 6 rows are left out" in env.doubts[0]
    assert "row 6: its difficulty 'Level ?' is no number" in env.doubts[0]


def test_a_system_message_from_a_column(tmp_path: Path) -> None:
    rows = [
        {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"system": " ", "conversations": [{"from": "human", "value": "r"}, {"from": "gpt", "value": "a"}]},
        {"system": "t", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "b"}]},
    ]
    env = made(tmp_path, rows, prompt="conversations", system="{system}")
    assert [said(env, n) for n in range(3)] == [
        [("system", "s"), ("user", "q")], [("user", "r")], [("system", "t"), ("user", "q")],
    ]  # fmt: skip
    assert env.doubts == [], "another system message is another prompt"
    told = made(tmp_path, rows[:2], prompt="conversations").doubts
    assert len(told) == 1
    assert "1 of 2 rows have a text in the column 'system', which the model does not see" in told[0]
    boxed = made(tmp_path, rows[:1], prompt="conversations", system=r"Use \boxed{} and {x}.")
    assert said(boxed)[0] == ("system", r"Use \boxed{} and {x}.")


@pytest.mark.parametrize("column", ["input", "context"])
def test_the_second_part_of_an_instruction_is_missed(tmp_path: Path, column: str) -> None:
    rows = [{"instruction": "Add.", column: "", "output": "0"}, {"instruction": "Add.", column: "2 3", "output": "5"}]
    told = made(tmp_path, rows, template=f"{{instruction}}\n{{{column}}}", answer="output").doubts
    assert told == []
    told = made(tmp_path, rows[1:], prompt="instruction", answer="output").doubts
    assert len(told) == 1
    assert f"1 of 1 rows have a text in the column {column!r}, which belongs to the column 'instruction'" in told[0]
    assert rf'template = "{{instruction}}\n{{{column}}}"' in told[0]


def test_a_call_as_openai_had_it_before_there_were_tools(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "3"},
    ]
    env = made(tmp_path, [{"messages": turns, "answer": "3"}], prompt="messages")
    (call,) = env.task(0).messages[1].tool_calls
    assert (call.name, call.arguments) == ("f", "{}")


def test_a_conversation_without_an_answer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not end in words of the assistant"):
        made(tmp_path, [{"messages": [{"role": "user", "content": "q"}]}], prompt="messages")


@pytest.mark.parametrize(
    "cell",
    [
        "[{'role': 'user', 'content': 'a'}\n {'role': 'assistant', 'content': 'b'}]",
        "[{'content': array(['a'], dtype=object), 'role': 'user'}]",
    ],
)
def test_messages_that_a_data_frame_printed_are_no_text(tmp_path: Path, cell: str) -> None:
    rows = [{"prompt": cell, "answer": "1"}]
    with pytest.raises(ConfigError, match="a data frame printed"):
        made(tmp_path, rows)
    assert said(made(tmp_path, rows, template="{prompt}")) == [("user", cell)]


# contradictions and rows that are left out


def test_rows_that_cannot_be_asked_or_judged_are_left_out_and_told(tmp_path: Path) -> None:
    rows = [
        *PAIRS, {"prompt": "a", "answer": None}, {"prompt": "b", "answer": float("nan")}, {"prompt": "c"},
        {"prompt": None, "answer": "1"}, {"prompt": " ", "answer": "1"}, {"prompt": "d", "answer": ""},
        {"prompt": "half \ud800", "answer": "1"}, {"prompt": "f", "answer": "half \ud800"},
    ]  # fmt: skip
    env = made(tmp_path, rows)
    assert len(env) == 2
    (text,) = env.doubts
    assert "8 of 10 rows are left out, and are no tasks" in text
    assert "row 3: its answer is None" in text


def test_contradictions_are_told_with_their_rows(tmp_path: Path) -> None:
    twins = [{"prompt": "six and six?", "answer": "13"}, {"prompt": " nine  and\nnine?", "answer": "19"}]
    env = made(tmp_path, [*PAIRS, *twins])
    assert [env.task(n).task["answer"] for n in range(3)] == ["12", "18", "19"]
    contradiction, blanks = env.doubts
    assert "1 rows contradict an earlier one" in contradiction
    assert "rows 1 and 3, '12' and '13'" in contradiction
    assert "codes of characters alone, 1 of them with another answer" in blanks
    keys = env.item_keys()
    assert keys[1] == keys[2] != keys[0], "on one side of the held-out split"


def test_blanks_alone_are_no_other_answer(tmp_path: Path) -> None:
    env = made(tmp_path, [*PAIRS, {"prompt": "six  and six?", "answer": "12"}])
    assert len(env) == 3
    assert "1 prompts differ from an earlier one in blanks, case or codes of characters alone; both" in env.doubts[0]


def test_equal_repeats_are_no_contradiction(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lachesis")
    env = made(tmp_path, [*PAIRS, {"prompt": "six and six?", "answer": 12.0}])
    assert (len(env), env.doubts) == (2, [])
    assert "1 of 3 rows repeat a prompt" in caplog.text


def test_a_difficulty_that_is_missing_in_some_rows_is_told(tmp_path: Path) -> None:
    rows = [pair | {"level": level} for pair, level in zip(PAIRS, [1, float("nan")], strict=True)]
    env = made(tmp_path, rows, difficulty="level")
    assert [env.task(n).difficulty for n in range(2)] == [1.0, None]
    assert "1 of 2 rows have no 'level'" in env.doubts[0]


def test_a_key_that_one_object_has_twice_is_told(tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text('{"prompt": "a", "answer": "1", "answer": "2"}\n{"prompt": "b", "answer": "{\\"answer\\": 1}"}\n')
    env = Dataset(path=str(path))
    assert len(env) == 1
    assert "it says 'answer' twice" in env.doubts[0]


def test_a_key_that_an_inner_object_has_twice_is_told(tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text(
        '{"prompt": "a", "reward_model": {"ground_truth": "1", "ground_truth": "2"}}\n'
        '{"prompt": "b", "ground_truth": 0, "reward_model": {"ground_truth": "1"}}\n'
    )
    env = Dataset(path=str(path), answer="reward_model.ground_truth")
    assert said(env) == [("user", "b")]
    assert "row 1: it says 'ground_truth' twice" in env.doubts[0]


def test_answers_that_may_stand_for_a_missing_one_are_told(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "answer": said} for n, said in enumerate(["null", "#N/A", "7", "nullify"])]
    env = made(tmp_path, rows)
    assert len(env) == 4
    assert "2 of 4 answers are 'null' or the like" in env.doubts[0]


def test_a_first_line_in_the_middle_of_a_table_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text("\ufeffprompt,answer\na,1\nprompt,answer\nb,2\n")
    env = Dataset(path=str(path))
    assert [said(env, n) for n in range(len(env))] == [[("user", "a")], [("user", "b")]]
    assert "row 2: it repeats the names of the columns" in env.doubts[0]


def test_columns_of_one_name_are_refused_where_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "twice.csv"
    path.write_text("prompt,answer,answer\na,1,2\n")
    with pytest.raises(ConfigError, match="several columns are named 'answer'"):
        Dataset(path=str(path))
    path.write_text("prompt,answer,x,x\na,1,2,3\n")
    assert len(Dataset(path=str(path))) == 1
    pq.write_table(pa.table([["a"], ["1"], ["2"]], names=["prompt", "answer", "answer"]), tmp_path / "twice.parquet")
    with pytest.raises(ConfigError, match="several columns are named 'answer'"):
        Dataset(path=str(tmp_path / "twice.parquet"))


# files


def lines(rows: list) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv"])
@pytest.mark.parametrize("packed", [False, True])
def test_every_encoding_and_gzip(tmp_path: Path, encoding: str, ending: str, packed: bool) -> None:
    separator = "\t" if ending == "tsv" else ","
    text = {"jsonl": lines(PAIRS), "json": json.dumps(PAIRS)}.get(
        ending, "\r\n".join(separator.join(row) for row in [PAIRS[0].keys(), *(row.values() for row in PAIRS)]) + "\r\n"
    )
    data = text.encode(encoding)
    path = tmp_path / f"rows.{ending}{'.gz' * packed}"
    path.write_bytes(gzip.compress(data) if packed else data)
    env = Dataset(path=str(path))
    assert [(env.task(n).messages[0].content, env.task(n).task["answer"]) for n in range(2)] == [
        tuple(row.values()) for row in PAIRS
    ]


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": {"0": "a", "1": "b"}, "answer": {"0": "1", "1": "2"}},
        {"columns": ["prompt", "answer"], "index": [0, 1], "data": [["a", "1"], ["b", "2"]]},
        {"prompt": ["a", "b"], "answer": ["1", "2"]},
        {"schema": {}, "data": [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]},
    ],
)
def test_the_forms_in_which_pandas_writes_a_frame_as_json(tmp_path: Path, content: dict) -> None:
    path = tmp_path / "frame.json"
    path.write_text(json.dumps(content))
    env = Dataset(path=str(path))
    assert [env.task(n).task["answer"] for n in range(2)] == ["1", "2"]


TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("content", "answers"),
    [
        ({"prompt": TURNS, "answer": ["4", "four"]}, [["4", "four"]]),
        ({"prompt": TURNS[1:], "answer": ["4"]}, ["4"]),
        ({"prompt": TURNS, "answer": "4"}, ["4"]),
        ({"prompt": "q", "answer": ["4", "four"]}, [["4", "four"]]),
        ({"a": {"prompt": "q", "answer": "1"}, "b": {"prompt": "r", "answer": "2"}}, ["1", "2"]),
    ],
    ids=["as many turns as answers", "one of each", "a conversation", "a text", "rows under labels"],
)
def test_an_object_is_a_row_or_holds_rows(tmp_path: Path, content: dict, answers: list) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(content, indent=1))
    env = Dataset(path=str(path))
    assert [env.task(n).task["answer"] for n in range(len(env))] == answers
    assert said(env)[-1] == ("user", "q")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"prompt": TURNS[1:] * 2, "answer": ["1", "2"]}, "may be the turns of one row, or a column"),
        ({"train": [{"prompt": "a", "answer": "1"}], "test": [{"prompt": "b", "answer": "2"}]}, "train, test; write"),
    ],
)
def test_rows_and_columns_that_cannot_be_told_apart_are_refused(tmp_path: Path, content: dict, words: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words):
        Dataset(path=str(path))


@pytest.mark.parametrize("packing", ["bz2", "xz", "zst"])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_other_packings(tmp_path: Path, packing: str, ending: str) -> None:
    path = tmp_path / f"rows.{ending}.{packing}"
    data = lines(PAIRS).encode()
    if ending == "parquet":
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(PAIRS), sink)
        data = sink.getvalue().to_pybytes()
    made_by = {"bz2": bz2.compress, "xz": lzma.compress, "zst": lambda one: bytes(pa.Codec("zstd").compress(one))}
    path.write_bytes(made_by[packing](data))
    env = Dataset(path=str(path))
    assert [env.task(n).task["answer"] for n in range(2)] == ["12", "18"]
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ConfigError, match="no whole"):
        Dataset(path=str(path))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "packed by gzip, so its name must end in .gz"),
        ("a.csv", b"PAR1....", "a Parquet file, so its name must end in .parquet"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("a.csv", b"\n<!DOCTYPE html><html>", "a web page"),
        ("a.csv", b"PK\x03\x04....", "an Excel workbook"),
    ],
)
def test_a_file_of_another_kind_than_its_name_says_is_named(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        Dataset(path=str(tmp_path / name))


def test_commas_in_the_first_line_of_a_table_of_tabs(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("what, then, is asked\tanswer\na\t1\n")
    assert said(Dataset(path=str(path), prompt="what, then, is asked")) == [("user", "a")]


@pytest.mark.parametrize("cell", ['"open,1', '"a\\"b",1'])
def test_a_cell_that_is_not_ended_is_named_with_its_line(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f'prompt,answer\n"two\nlines",0\n{cell}\nb,2\n')
    with pytest.raises(ConfigError, match="line 4: a cell that begins with a quotation mark is not ended"):
        Dataset(path=str(path))


def test_a_frame_with_a_missing_value_has_its_whole_numbers_back(tmp_path: Path) -> None:
    path = tmp_path / "frame.csv"
    path.write_text(",prompt,answer,level\n0,a,18.0,1.5\n1,b,,2.0\n2,c,7.0,3.0\n")
    env = Dataset(path=str(path), difficulty="level", metadata=["level"])
    assert [env.task(n).task["answer"] for n in range(2)] == ["18", "7"]
    assert env.task(0).task["metadata"] == {"level": "1.5"}, "a column of fractions stays as it is"
    assert "1 of 3 rows are left out" in env.doubts[0]


def test_semicolons_long_cells_and_chats_as_python_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["prompt", "answer"])
        writer.writerow(["x" * 200_000, "1"])
        writer.writerow([str([{"role": "user", "content": "it's, so"}]), "2"])
    env = Dataset(path=str(path))
    assert len(env.task(0).messages[0].content) == 200_000
    assert said(env, 1) == [("user", "it's, so")]


@pytest.mark.parametrize("written", ['["\\\\frac{1}{2}"]', "['a', 'b']"])
def test_an_answer_that_is_the_text_of_a_list_is_told_with_its_cure(tmp_path: Path, written: str) -> None:
    """Skywork's data set has its answers so."""
    rows = [
        {"prompt": "a", "reward_model": {"ground_truth": written}},
        {"prompt": "b", "reward_model": {"ground_truth": "[1, 2]"}},
    ]
    (doubt,) = made(tmp_path, rows, answer="reward_model.ground_truth").doubts
    assert "1 of 2 answers are the text of a list" in doubt
    assert 'answer = "reward_model.ground_truth.0"' in doubt


def test_the_first_of_a_list_in_a_text_is_an_answer(tmp_path: Path) -> None:
    env = made(
        tmp_path, [{"prompt": "a", "answer": '["18"]'}, {"prompt": "b", "answer": "['7', '8']"}], answer="answer.0"
    )
    assert [env.task(n).task["answer"] for n in range(2)] == ["18", "7"]
    assert not env.doubts


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"'])
def test_the_line_in_which_excel_names_the_separator(tmp_path: Path, first: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{first}\r\nprompt;answer\r\nhow many, then?;7\r\n")
    env = Dataset(path=str(path))
    assert said(env) == [("user", "how many, then?")]
    assert env.task(0).task["answer"] == "7"


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.csv", "prompt,answer\né,1\n".encode("latin-1"), "save it as UTF-8"),
        ("a.jsonl.gz", b"no gzip", "no whole gzip file"),
        ("a.jsonl.gz", gzip.compress(lines(PAIRS).encode(), mtime=0)[:-9], "no whole gzip file"),
        ("a.jsonl", b'[\n{"prompt": "a"}]', "its name must end in .json"),
        ("a.json", b'{"error": "not found"}', "no JSON list of objects"),
        ("a.jsonl", b'{"prompt": "a", "answer": 1}{"prompt": "b", "answer": 2}\n', "in a line of its own"),
        ("a.json", b'{"prompt": ["a", "b"], "answer": ["1"]}', "no JSON list of objects"),
        ("a.jsonl", b'{\n"prompt": "a",\n"answer": 1\n}\n', "without indentation"),
        ("a.jsonl", '{"prompt": "é", "answer": 1}\n'.encode("latin-1"), "save the file as UTF-8"),
    ],
    ids=[
        "Latin-1",
        "no gzip",
        "half of a gzip file",
        "a list over lines",
        "no list",
        "two rows in a line",
        "columns of other lengths",
        "indented",
        "lines in Latin-1",
    ],
)
def test_what_cannot_be_read_says_what_to_do(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        Dataset(path=str(tmp_path / name))


# the same tasks again, and many of them


def test_keys_stay_with_another_template_system_message_and_order(tmp_path: Path) -> None:
    rows = [{"q": f"what is {n}?", "answer": str(n)} for n in range(9)]
    one = made(tmp_path, rows, prompt="q")
    other = made(tmp_path, rows[::-1], template="Think. {q}\nBox it.", system="s")
    assert one.item_keys().tolist() == other.item_keys().tolist()[::-1]
    assert len(set(one.item_keys().tolist())) == 9


def test_a_large_file_is_looked_through_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(row_index, "_LARGE_BYTES", 1)
    rows = [*PAIRS, {"prompt": "a", "answer": None}]
    first = made(tmp_path, rows)
    looked: list[int] = []
    look = Dataset._look_through
    monkeypatch.setattr(Dataset, "_look_through", lambda self: looked.append(1) or look(self))
    again = Dataset(path=str(tmp_path / "rows.jsonl"))
    assert not looked
    assert [again.task(n) for n in range(2)] == [first.task(n) for n in range(2)]
    assert (again.doubts, again.item_keys().tolist()) == (first.doubts, first.item_keys().tolist())
    Dataset(path=str(tmp_path / "rows.jsonl"), system="s")
    assert len(looked) == 1, "other parameters"
    for one in (tmp_path / "cache/lachesis/datasets").iterdir():
        one.write_bytes(b"damaged")
    assert len(Dataset(path=str(tmp_path / "rows.jsonl"))) == 2
    grown = made(tmp_path, [*rows, {"prompt": "new", "answer": "1"}])
    assert len(grown) == 3
    assert np.isin(first.item_keys(), grown.item_keys()).all()


def test_a_file_that_is_written_to_while_it_is_in_use_is_refused_not_misread(tmp_path: Path) -> None:
    env = made(tmp_path, PAIRS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "other", "answer": "1"}\n' * 3)
    with pytest.raises(ConfigError, match="written to while it is in use"):
        env.task(0)


def test_prompts_that_look_alike_are_named_and_on_one_side_of_the_split(tmp_path: Path) -> None:
    asked = ["caf\u00e9 1+1?", "cafe\u0301 1+1?", "Caf\u00e9 \uff11+1?", "caf\u00e9\u200b 1+1?", "caf\u00e9 1-1?"]
    env = made(tmp_path, [{"prompt": one, "answer": str(place)} for place, one in enumerate(asked)])
    (doubt,) = env.doubts
    assert "3 prompts differ from an earlier one in blanks, case or codes of characters alone, 3 of them with" in doubt
    assert len(set(env.item_keys().tolist())) == 2
    assert len(env) == 5, "all are asked"


def test_numbers_of_32_bits_are_the_decimals_that_were_written(tmp_path: Path) -> None:
    for kind, numbers in (
        (pa.float32(), [0.1, 3.0, None, 1e-7]),
        (pa.float16(), [np.float16(0.1), np.float16(3), None]),
    ):
        path = tmp_path / "rows.parquet"
        asked = [f"q{place}" for place in range(len(numbers))]
        pq.write_table(pa.table({"prompt": asked, "answer": pa.array(numbers, kind)}), path)
        env = Dataset(path=str(path))
        assert [env.task(i).task["answer"] for i in range(len(env))] == ["0.1", "3", "0.0000001"][: len(env)]


@pytest.mark.parametrize(
    ("name", "content", "cure"),
    [
        ("a.jsonl", '{"prompt": "q", "answer": 1}\r{"prompt": "r", "answer": 2}\r', "end in CR alone"),
        ("a.json", '[["q", 1], ["r", 2]]', "orient='records'"),
    ],
)
def test_a_file_that_cannot_be_read_says_how_to_write_it(tmp_path: Path, name: str, content: str, cure: str) -> None:
    (tmp_path / name).write_text(content, newline="")
    with pytest.raises(ConfigError, match=cure):
        Dataset(path=str(tmp_path / name))
