"""Tasks from a data set: a file of questions and answers, or a Hugging Face data set by name.

In: rows with a column for the prompt and, mostly, one for the answer. Out: a task a row, judged by raters (`numeric`,
`exact_match`, `math` and others compare with the answer). Guarantees that a prompt occurs once, and that a task's name
is that of its prompt, so that the curriculum knows it again whatever the order and the number of the rows.
"""

import logging
from pathlib import Path
from typing import Any

import msgspec

from lachesis.pipeline.environments.environment import Environment
from lachesis.pipeline.tasks.program_tests import program_tests
from lachesis.pipeline.tasks.references import reference_text
from lachesis.pipeline.tasks.rows import DatasetRow, column, read_file, read_named
from lachesis.pipeline.tasks.task import Task, prompt_hash
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

__all__ = ["Dataset"]

log = logging.getLogger("lachesis")

_ANSWER = "answer"
"""The column of the answer, unless `answer` names another."""


class Dataset(Environment):
    """The rows of one data set."""

    def __init__(
        self,
        *,
        path: str | None = None,
        name: str | None = None,
        subset: str | None = None,
        split: str = "train",
        prompt: str = "prompt",
        answer: str | None = _ANSWER,
        answer_after: str | None = None,
        tests: str | None = None,
        template: str | None = None,
        system: str | None = None,
        skill: str | None = None,
        difficulty: str | None = None,
        metadata: list[str] | None = None,
        size: int | None = None,
    ) -> None:
        """Read `path` (.jsonl, .json, .csv, .parquet), or the data set `name` with its `subset` and `split`.

        `prompt`, `answer`, `skill`, `difficulty`: columns; `answer` is "" or null where there is none, and may be
        missing beside `tests`. A prompt is text or a list of chat messages. `answer_after`: the answer is what follows
        the last of this text ("####" in GSM8K). `tests`: the column of tests that the rater `code` runs, in any form of
        `pipeline.tasks.program_tests`. `template`: what is asked, with columns in braces: "{question}\\nAnswer with a
        number.". `system`: a system message. `metadata`: columns that raters get as well. `size`: the first rows alone.
        Raises `ConfigError` where the data set or a column is missing or unfit.
        """
        if (path is None) == (name is None):
            raise ConfigError("dataset: give either path, a file, or name, a Hugging Face data set")
        self._where = f"data set {path or name}"
        self._columns = {"prompt": prompt, "answer": answer or None, "skill": skill, "difficulty": difficulty}
        self._answer_after = answer_after
        self._tests = tests
        self._template = template
        self._system = system
        self._metadata = metadata or []
        rows = read_file(Path(path)) if path is not None else read_named(str(name), subset, split)
        if tests is not None and answer == _ANSWER and not any(_ANSWER in row for row in rows[:size]):
            self._columns["answer"] = None
        tasks: dict[str, Task] = {}
        for number, row in enumerate(rows[:size], 1):
            task = self._task(row, f"{self._where} row {number}")
            tasks.setdefault(task.item, task)
        self._tasks = list(tasks.values())
        if repeated := len(rows[:size]) - len(tasks):
            log.info("%s: %d of %d rows repeat a prompt and are left out", self._where, repeated, len(rows[:size]))

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        return self._tasks[index]

    def _task(self, row: DatasetRow, where: str) -> Task:
        messages = self._messages(row, where)
        about: dict[str, Any] = {}
        if (name := self._columns["answer"]) is not None:
            about["answer"] = self._answer(column(row, name, where), where)
        if self._tests is not None:
            try:
                about["tests"] = program_tests(_plain(column(row, self._tests, where), where), row)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
        if self._metadata:
            about["metadata"] = {one: _plain(column(row, one, where), where) for one in self._metadata}
        skill = self._value(row, "skill", where)
        difficulty = self._value(row, "difficulty", where)
        if difficulty is not None and (isinstance(difficulty, bool) or not isinstance(difficulty, int | float)):
            try:
                difficulty = float(difficulty)
            except (TypeError, ValueError):
                raise ConfigError(f"{where}: its difficulty {difficulty!r:.60} is no number") from None
        return Task(
            item=prompt_hash("\n".join(f"{one.role}: {one.content}" for one in messages))[:16],
            prompt=messages,
            task=about,
            skill=None if skill is None else str(skill),
            difficulty=None if difficulty is None else float(difficulty),
        )

    def _messages(self, row: DatasetRow, where: str) -> list[Message]:
        system = [Message(role="system", content=self._system)] if self._system else []
        if self._template is not None:
            return [*system, Message(role="user", content=self._filled(row, where))]
        given = column(row, str(self._columns["prompt"]), where)
        if isinstance(given, str) and given.strip():
            return [*system, Message(role="user", content=given)]
        try:
            messages = msgspec.convert(given, list[Message])
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: its prompt is neither text nor chat messages: {error}") from error
        if not messages:
            raise ConfigError(f"{where}: its prompt is empty")
        return [*system, *messages]

    def _filled(self, row: DatasetRow, where: str) -> str:
        try:
            return str(self._template).format_map(row)
        except KeyError as error:
            column(row, str(error.args[0]), f"{where}: template")  # names the nearest
            raise
        except (AttributeError, IndexError, ValueError) as error:
            raise ConfigError(f"{where}: template {self._template!r:.80} cannot be filled: {error}") from error

    def _answer(self, value: Any, where: str) -> str:
        if value is None:
            raise ConfigError(f"{where}: its answer is None; drop the row, or set answer = ''")
        text = reference_text(value, where)
        if self._answer_after is not None:
            _, mark, text = text.rpartition(self._answer_after)
            if not mark or not text.strip():
                raise ConfigError(f"{where}: no answer follows {self._answer_after!r} in {str(value)[-60:]!r}")
        return text.strip()

    def _value(self, row: DatasetRow, what: str, where: str) -> Any:
        name = self._columns[what]
        return None if name is None else column(row, name, where)


def _plain(value: Any, where: str) -> Any:
    """Return a value as it will be after the wire."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {value!r:.60} cannot travel with a rollout: {error}") from error
