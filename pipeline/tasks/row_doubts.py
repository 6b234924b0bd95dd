"""Counts rows of a data set that are used, but that may have a mistake. Pure.

Such rows stay: only the author of the data set knows whether a text is an answer or stands for a missing one.
"""

from collections.abc import Iterator
from typing import Any

from lachesis.pipeline.tasks.choices import read_choices
from lachesis.pipeline.tasks.columns import INSTRUCTION, SECOND_PARTS, is_missing
from lachesis.pipeline.tasks.references import holds_list
from lachesis.pipeline.tasks.row_stores import DatasetRow
from lachesis.pipeline.tasks.task import Task
from lachesis.pipeline.tasks.transcripts import template_mark
from lachesis.schemas.errors import ConfigError

__all__ = ["RowDoubts"]

_MISSING = frozenset({"null", "NULL", "Null", "None", "NA", "N/A", "n/a", "#N/A", "nil", "Nan"})
_SHEET_ERRORS = ("#N/A", "#REF!", "#VALUE!", "#NAME?", "#DIV/0!", "#NUM!", "#NULL!", "#ERROR!")
_SYSTEM = "system"
_CHOICES = ("choices", "options", "endings", "mc1_targets")
_UNSEEN = {
    "tools": "tools",
    **dict.fromkeys(("image", "images", "picture", "video", "videos", "audio", "audios"), "a picture or a recording"),
}
"""Columns that belong to a prompt and that an environment of kind dataset cannot put into it, and what is in them."""
_MAX_SHOWN = 60


class RowDoubts:
    """Doubts about the rows.

    `answer`: the column of the answers. `system`, `choices`: whether the configuration names columns for them.
    """

    def __init__(self, answer: str | None, *, system: bool, choices: bool) -> None:
        self._answer = answer
        self._system = system
        self._choices = choices
        self._rows = 0
        self._lists = (0, "")
        self._missing = (0, "")
        self._unread = 0
        self._unasked = (0, "")
        self._inputs = (0, "")
        self._marked = (0, "")
        self._unseen: dict[str, int] = {}

    def check_row(self, row: DatasetRow, task: Task) -> None:
        """Count a row that is used."""
        self._rows += 1
        said = task.task.get("answer")
        if holds_list(said):
            self._lists = self._lists[0] + 1, self._lists[1] or str(said)[:_MAX_SHOWN]
        elif isinstance(said, str) and (said in _MISSING or said in _SHEET_ERRORS):
            self._missing = self._missing[0] + 1, self._missing[1] or said
        if not self._system and self._has_unread_system(row, task):
            self._unread += 1
        if not self._choices and (name := _unasked_choices(row, task)) is not None:
            self._unasked = self._unasked[0] + 1, self._unasked[1] or name
        if (name := _unasked_input(row, task)) is not None:
            self._inputs = self._inputs[0] + 1, self._inputs[1] or name
        for name in _UNSEEN.keys() & row.keys():
            if not is_missing(row[name]) and len(str(row[name])) > len("[]"):
                self._unseen[name] = self._unseen.get(name, 0) + 1
        if (mark := next(filter(None, (template_mark(one.content) for one in task.messages)), None)) is not None:
            self._marked = self._marked[0] + 1, self._marked[1] or mark

    def texts(self) -> Iterator[str]:
        """Yield the messages to report."""
        if self._lists[0]:
            yield (
                f"{self._lists[0]} of {self._rows} answers are the text of a list, {self._lists[1]} say, and are "
                f'compared as they stand, blanks included. If what is in the list is the answer, give answer = "'
                f'{self._answer}.0"; a rater of your own can read all of it by task = ["{self._answer}"]'
            )
        if self._missing[0]:
            yield (
                f"{self._missing[0]} of {self._rows} answers are {self._missing[1]!r} or the like, which programs "
                "write for a missing value, and are compared as they stand. Remove these rows if it is no answer"
            )
        if self._unread:
            yield (
                f"{self._unread} of {self._rows} rows have a text in the column {_SYSTEM!r}, which the model does not "
                f'see. To ask with it, give {_SYSTEM} = "{{{_SYSTEM}}}"'
            )
        if self._unasked[0]:
            yield (
                f"{self._unasked[0]} of {self._rows} rows have choices in the column {self._unasked[1]!r}, which the "
                f'model does not see. To ask with them, give choices = "{self._unasked[1]}"'
            )
        if self._inputs[0]:
            yield (
                f"{self._inputs[0]} of {self._rows} rows have a text in the column {self._inputs[1]!r}, which belongs "
                f"to the column {INSTRUCTION!r}, and which the model does not see. To ask with it, give template = "
                f'"{{{INSTRUCTION}}}\\n{{{self._inputs[1]}}}"'
            )
        for name, count in sorted(self._unseen.items()):
            yield (
                f"{count} of {self._rows} rows have {_UNSEEN[name]} in the column {name!r}, which the model does not "
                "see: an environment of kind dataset asks in text alone. Write an environment of your own for them, or "
                "leave those rows out"
            )
        if self._marked[0]:
            yield (
                f"{self._marked[0]} of {self._rows} prompts hold the marks of a chat template, {self._marked[1]!r} "
                "say, and the model's own template is put around them, so that it sees both, and perhaps an answer "
                "among them. Give a column with chat messages, or with the question alone"
            )

    def _has_unread_system(self, row: DatasetRow, task: Task) -> bool:
        said: Any = row.get(_SYSTEM)
        is_text = isinstance(said, str) and bool(said.strip())
        return is_text and all(one.role != "system" for one in task.messages)


def _unasked_choices(row: DatasetRow, task: Task) -> str | None:
    """Return the name of a column with choices of which the prompt shows none; None if there is none."""
    for name in _CHOICES:
        if row.get(name):
            try:
                choices = read_choices(row[name], "")
            except ConfigError:
                continue
            if all(one.text not in message.content for one in choices for message in task.messages):
                return name
    return None


def _unasked_input(row: DatasetRow, task: Task) -> str | None:
    """Return the column with the second part of an instruction if the prompt leaves it out; None: it does not."""
    first = row.get(INSTRUCTION)
    shown = "\n".join(one.content for one in task.messages)
    if not isinstance(first, str) or not first.strip() or first.strip() not in shown:
        return None
    for name in SECOND_PARTS:
        second: Any = row.get(name)
        if isinstance(second, str) and second.strip() and second.strip() not in shown:
            return name
    return None
