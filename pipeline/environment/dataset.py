"""Makes tasks from a data set: a file of questions and answers, or a Hugging Face data set by name.

Each row, with a column for the prompt and usually one for the answer, becomes a task that raters score (`numeric`,
`exact_match`, `math` and others compare with the answer). Guarantees that a prompt occurs once; that a task's name and
key come from its prompt, so that the curriculum recognizes it whatever the order and the number of the rows; and that a
row that cannot be used or scored is left out and reported, never guessed at. Only the part of the rows that
`tasks.rows` keeps is in memory.
"""

import logging
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.tasks.answer_column import DEFAULT_ANSWER, AnswerColumn
from lachesis.pipeline.tasks.choice_columns import ChoiceColumns
from lachesis.pipeline.tasks.choices import AnswerChoice, AnswerForm, choice_lines
from lachesis.pipeline.tasks.columns import braced_names, column, fill_template, is_missing, template_columns
from lachesis.pipeline.tasks.conversations import Conversation, read_conversation
from lachesis.pipeline.tasks.item_keys import Keys, exact_key, one_spelling, prompt_key
from lachesis.pipeline.tasks.labels import difficulty_in, skill_in
from lachesis.pipeline.tasks.program_tests import program_tests
from lachesis.pipeline.tasks.row_doubts import RowDoubts
from lachesis.pipeline.tasks.row_index import RowIndex, index_file, load_index, save_index
from lachesis.pipeline.tasks.row_report import RowReport, first_of_each, twins
from lachesis.pipeline.tasks.row_stores import DatasetRow
from lachesis.pipeline.tasks.rows import read_named
from lachesis.pipeline.tasks.shards import find_shards, read_files
from lachesis.pipeline.tasks.task import Task, prompt_hash, prompt_text
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

__all__ = ["Dataset"]

log = logging.getLogger("lachesis")

_CHOICES = "choices"
"""Stands for the choices in a template."""
_PICTURES = {"<image>": ("images", "image"), "<video>": ("videos", "video")}
"""Marks in a prompt, and the columns that they stand for."""
_MAX_EXAMPLES = 3
_MAX_TEMPLATE_ROWS = 64
"""Rows in which the template's columns are searched."""


class Dataset(Environment):
    """The rows of one data set."""

    def __init__(
        self,
        *,
        path: str | list[str] | None = None,
        name: str | None = None,
        subset: str | None = None,
        split: str = "train",
        prompt: str = "prompt",
        answer: str | None = DEFAULT_ANSWER,
        answer_after: str | None = None,
        answer_form: AnswerForm | None = None,
        answer_words: dict[str, str] | None = None,
        choices: str | list[str] | None = None,
        tests: str | None = None,
        template: str | None = None,
        system: str | None = None,
        skill: str | None = None,
        difficulty: str | None = None,
        metadata: list[str] | None = None,
        task: dict[str, str] | list[str] | None = None,
        size: int | None = None,
    ) -> None:
        """Read `path` (.jsonl, .json, .csv, .tsv, .parquet; packed: .gz, .bz2, .xz, .zst), or `name` with its `split`.

        `path` may be a glob, a folder of files of one kind, or a list of these: rows come in the order of the names.

        `prompt`, `answer`, `skill`, `difficulty`: columns; dots lead to those inside others
        ("reward_model.ground_truth"). `answer` is "" or null where there is none, and may be missing beside `tests`; a
        list of answers means any of them. A prompt is text, a list of chat messages or ShareGPT's turns; an assistant's
        message at its end is not part of the prompt, and is the answer if there is no column for it. `answer_after`:
        the answer is the text after the last occurrence of this text ("####" in GSM8K). `answer_words`: the answers for
        what the column holds, { true = "yes", false = "no" } say. `choices`: the column of a question's choices, or the
        columns of one each. They are listed below the prompt, or for "{choices}" in the template, under the letters A,
        B, C..., and the answer is the letter of the right one. `answer` says it by its place from 0 ("index") or 1
        ("number"), its "label" or its "text"; `answer_form`: which of these, unless it is clear. `tests`: the column of
        tests that the rater `code` runs, in any form of `pipeline.tasks.program_tests`. `template`: the prompt, with
        columns in braces: "{question}\\nAnswer with a number."; other braces stay as they are. `system`: a system
        message, which may also have columns in braces. `metadata`: columns that raters get as well. `task`: columns
        that raters get beside `answer`, by their names or, given a table, by others. `size`: use only the first rows.
        Raises `ConfigError` if the data set or a column is missing or unfit.
        """
        if (path is None) == (name is None):
            raise ConfigError("dataset: give either path, a file, or name, a Hugging Face data set")
        files = [] if path is None else find_shards(path)
        self._where = f"data set {name or (files[0] if len(files) == 1 else path)}"
        self._prompt = prompt
        self._answer = answer or None
        if choices is None and answer_form is not None:
            raise ConfigError("dataset: answer_form is for choices, and choices names no column")
        self._choices = None if choices is None else ChoiceColumns(choices, self._answer, answer_form)
        self._answers = AnswerColumn(answer or "", answer_after, answer_words)
        self._skill = skill
        self._difficulty = difficulty
        self._tests = tests
        self._template = template
        self._system = system
        self._metadata = metadata or []
        named = task or {}
        self._extra = named if isinstance(named, dict) else {one.rpartition(".")[2]: one for one in named}
        if taken := sorted({"answer", "choices", "tests", "metadata"} & self._extra.keys()):
            raise ConfigError(f"dataset: task names {taken[0]!r}, which has a parameter of its own")
        ours = {"self", "named", "taken", "files", "__class__"}
        given = {key: value for key, value in locals().items() if key not in ours and key != "ours"}
        kept = index_file(files, given)
        index = load_index(kept, len(files))
        if files:
            self._rows = read_files(files, self._named_columns(), [] if index is None else index.lines)
        else:
            self._rows = read_named(str(name), subset, split)
        self._last = len(self._rows) if size is None else min(size, len(self._rows))
        if self._last < 1:
            raise ConfigError(f"{self._where}: size is {size}; it must be at least 1")
        self._asked_columns = [] if template is None else self._columns_in(template, needed=True)
        self._system_columns = [] if system is None else self._columns_in(system, needed=False)
        self._template_shows_choices = self._choices is not None and self._choices.are_in(self._asked_columns)
        self._refuse_repeated_columns()
        answered = True if index is None else index.answered
        if tests is not None and answer == DEFAULT_ANSWER and index is None:
            answered = any(DEFAULT_ANSWER in row for row in self._first_rows())
        self._answer = self._answer if answered else None
        if index is None:
            index = self._look_through()
            save_index(kept, index)
        self._places = array("q")
        self._places.frombytes(index.places)
        self._keys = np.frombuffer(index.keys, np.uint64)
        self.doubts = index.doubts

    def __len__(self) -> int:
        return len(self._places)

    def task(self, index: int) -> Task:
        row = self._places[index]
        return self._task(self._rows[row], f"{self._where} row {self._rows.name_of(row)}")

    def item_keys(self) -> Keys:
        """Return the keys of the rows' questions: `system` and the rest of the template do not change them."""
        return self._keys

    def _first_rows(self) -> Iterator[DatasetRow]:
        return islice(iter(self._rows), self._last)

    def _columns_in(self, template: str, *, needed: bool) -> list[str]:
        """Return the columns that a text names in braces."""
        rows = list(islice(self._first_rows(), _MAX_TEMPLATE_ROWS))
        if self._choices is not None:
            rows = [self._choices.filled_in(row, "") for row in rows]
        try:
            return template_columns(template, rows, needed=needed)
        except ConfigError as error:
            raise ConfigError(f"{self._where} row 1: {error}") from error

    def _look_through(self) -> RowIndex:
        """Find the rows to use, their keys, and the messages about the others."""
        report = RowReport(self._where)
        places, keys, exact, answers = array("q"), array("Q"), array("Q"), array("Q")
        hard, doubts = 0, RowDoubts(self._answer, system=self._system is not None, choices=self._choices is not None)
        for number, (row, twice) in enumerate(islice(self._rows.with_repeats(self._read_columns()), self._last)):
            try:
                task = self._task(row, "")
                asked = self._asked(row, task)
                msgspec.msgpack.encode(task.messages)
                judged = msgspec.msgpack.encode(task.task, order="deterministic")
            except UnicodeEncodeError:
                report.leave_out(self._rows.name_of(number), "it holds half of a character, which no tokenizer takes")
                continue
            except ConfigError as error:
                report.leave_out(self._rows.name_of(number), str(error).removeprefix(": "))
                continue
            if twice is not None:
                report.leave_out(self._rows.name_of(number), f"it says {twice!r} twice, as two keys of one object")
                continue
            if all(name == value for name, value in row.items()):
                why = "it repeats the names of the columns, as files do that were put together"
                report.leave_out(self._rows.name_of(number), why)
                continue
            hard += task.difficulty is not None
            doubts.check_row(row, task)
            if self._choices is not None:
                self._choices.count(task.task.get("answer"))
            places.append(number)
            keys.append(prompt_key(asked))
            exact.append(int(task.item, 16))
            answers.append(exact_key(judged))
        if not places:
            report.refuse_all_left_out()
        kept = self._without_repeats(report, places, *(np.array(one, np.uint64) for one in (keys, exact, answers)))
        if self._difficulty is not None and 0 < hard < len(places):
            report.say(
                f"{len(places) - hard} of {len(places)} rows have no {self._difficulty!r}, so the curriculum uses that "
                "of none: fill it in, or leave those rows out"
            )
        try:
            for text in chain(doubts.texts(), () if self._choices is None else self._choices.doubts()):
                report.say(text)
        except ConfigError as error:
            raise ConfigError(f"{self._where}: {error}") from error
        return RowIndex(
            lines=self._rows.lines(),
            places=array("q", (places[one] for one in kept)).tobytes(),
            keys=np.array(keys, np.uint64)[kept].tobytes(),
            answered=self._answer is not None,
            doubts=report.texts(self._last),
        )

    def _without_repeats(
        self, report: RowReport, places: "array[int]", keys: Keys, exact: Keys, answers: Keys
    ) -> NDArray[np.int64]:
        """Return the first row of each prompt, and report prompts with rows that do not agree."""
        first = first_of_each(exact)
        own = first == np.arange(len(first))
        against = list(twins(first, lambda one, two: answers[one] != answers[two]))
        if against:
            shown = "; ".join(self._pair(places[one], places[two]) for one, two in against[:_MAX_EXAMPLES])
            report.say(
                f"{len(against)} rows contradict an earlier one, which counts: the same prompt with another answer. "
                f"Correct them, or leave them out: {shown}"
            )
        repeated = len(first) - int(own.sum())
        if repeated > len(against):
            log.info("%s: %d of %d rows repeat a prompt and are left out", self._where, repeated, self._last)
        kept = np.flatnonzero(own)
        near = first_of_each(keys[kept])
        alike = list(twins(near, lambda one, two: self._have_one_text(places[kept[one]], places[kept[two]])))
        if alike:
            other = sum(answers[kept[one]] != answers[kept[two]] for one, two in alike)
            shown = "; ".join(self._pair(places[kept[one]], places[kept[two]]) for one, two in alike[:_MAX_EXAMPLES])
            against_it = f", {other} of them with another answer" if other else ""
            report.say(
                f"{len(alike)} prompts differ from an earlier one in blanks, case or codes of characters alone"
                f"{against_it}; both are tasks, on the same side of the held-out split: {shown}"
            )
        return kept

    def _have_one_text(self, one: int, two: int) -> bool:
        """Return whether two rows have `one_spelling`: different system messages count as a difference."""
        first, second = [one_spelling(prompt_text(self._task(self._rows[place], "").messages)) for place in (one, two)]
        return first == second

    def _pair(self, one: int, two: int) -> str:
        said = [self._task(self._rows[place], "") for place in (one, two)]
        about = [str(task.task.get("answer", task.task.get("tests", "")))[:40] for task in said]
        asked = said[0].messages[-1].content.strip()[:60]
        return (
            f"rows {self._rows.name_of(one)} and {self._rows.name_of(two)}, {about[0]!r} and {about[1]!r}, of {asked!r}"
        )

    def _named_columns(self) -> frozenset[str]:
        """Return the outermost columns that the parameters name, before any row is read."""
        asked = [self._prompt] if self._template is None else braced_names(self._template)
        named = [name for name in (self._answer, self._tests, *asked) if name is not None]
        return frozenset(part for name in named for part in {name, name.partition(".")[0]})

    def _choice_columns(self) -> list[str]:
        return [] if self._choices is None else self._choices.columns

    def _read_columns(self) -> list[str]:
        """Return the columns that are read, and the outermost ones that hold them."""
        inner = [
            *self._choice_columns(),
            self._tests,
            self._skill,
            self._difficulty,
            *self._metadata,
            *self._extra.values(),
        ]
        asked = [*(self._asked_columns or [self._prompt]), *self._system_columns]
        named = [name for name in (self._answer, *asked, *inner) if name is not None]
        return list(dict.fromkeys(part for name in named for part in {name, name.partition(".")[0]}))

    def _refuse_repeated_columns(self) -> None:
        if not self._rows.repeated:
            return
        twice = [name for name in self._read_columns() if name in self._rows.repeated]
        if twice:
            raise ConfigError(
                f"{self._where}: several columns are named {twice[0]!r}, so which one is meant cannot be known; rename "
                "or remove one"
            )

    def _asked(self, row: DatasetRow, task: Task) -> str:
        """Return a row's question, which stays the same with another template or system message."""
        if self._template is not None:
            shown = [] if self._choices is None else [_CHOICES, *self._choices.columns]
            values = {name: column(row, name, "") for name in self._asked_columns if name not in shown}
            if shown:
                values[_CHOICES] = "\n".join(task.task[_CHOICES])
            if len(values) == 1:
                return str(next(iter(values.values())))
            return "\n".join(str(value) for _, value in sorted(values.items()))
        said = task.messages[1:] if self._system and not self._system_columns else task.messages
        text = [one.content for one in said if one.role == "user"]
        return "\n".join(text) if text else "\n".join(one.content for one in said)

    def _task(self, row: DatasetRow, where: str) -> Task:
        choices = [] if self._choices is None else self._choices.read(row, where)
        asked = self._conversation(row, choice_lines(choices), where)
        messages = [*self._system_message(row, where), *asked.messages]
        about: dict[str, Any] = {}
        if self._answer is not None:
            about["answer"] = self._answer_of(row, asked, choices, where)
        if choices:
            about[_CHOICES] = [one.text for one in choices]
        if self._tests is not None:
            given = _plain(column(row, self._tests, where), where)
            if is_missing(given):
                raise ConfigError(f"{where}: it has no tests")
            try:
                about["tests"] = program_tests(given, row)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
        if self._metadata:
            about["metadata"] = {one: _plain(column(row, one, where), where) for one in self._metadata}
        about |= {name: _plain(column(row, one, where), where) for name, one in self._extra.items()}
        return Task(
            item=prompt_hash(prompt_text(messages))[:16],
            prompt=messages,
            task=about,
            skill=None if self._skill is None else skill_in(column(row, self._skill, where)),
            difficulty=None if self._difficulty is None else difficulty_in(column(row, self._difficulty, where), where),
        )

    def _system_message(self, row: DatasetRow, where: str) -> list[Message]:
        if not self._system:
            return []
        if any(is_missing(column(row, name, where)) for name in self._system_columns):
            return []
        text = fill_template(self._system, row, where, self._system_columns) if self._system_columns else self._system
        return [Message(role="system", content=text)] if text.strip() else []

    def _conversation(self, row: DatasetRow, choices: str, where: str) -> Conversation:
        below = f"\n\n{choices}" if choices and not self._template_shows_choices else ""
        if self._template is not None:
            filled = row if self._choices is None else self._choices.filled_in(row, choices)
            text = fill_template(self._template, filled, where, self._asked_columns)
            return Conversation([Message(role="user", content=text + below)])
        try:
            found = read_conversation(column(row, self._prompt, where))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}" if where else str(error)) from error
        for mark, names in _PICTURES.items():
            given = next((row[name] for name in names if row.get(name)), None)
            if given is not None and any(mark in one.content for one in found.messages):
                raise ConfigError(
                    f"{where}: its prompt has a picture, {mark}, which would be lost: an environment of kind dataset "
                    "asks in text alone"
                )
        last = found.messages[-1]
        shown = msgspec.structs.replace(last, content=last.content + below) if below else last
        return msgspec.structs.replace(found, messages=[*found.messages[:-1], shown])

    def _answer_of(
        self, row: DatasetRow, asked: Conversation, choices: Sequence[AnswerChoice], where: str
    ) -> str | list[str]:
        value = self._answers.value(row, asked, where)
        if self._choices is None:
            return self._answers.texts(value, where)
        return self._choices.answer(self._answers.after_mark(value, where), choices, where)


def _plain(value: Any, where: str) -> Any:
    """Return a value in the form that it has after transport."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {value!r:.60} cannot travel with a rollout: {error}") from error
