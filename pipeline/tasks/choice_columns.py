"""Reads the choices of each row of a data set and which one is right. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lachesis.pipeline.tasks.choices import (
    AnswerChoice,
    AnswerForm,
    counted_place,
    find_right_choices,
    letter_of,
    read_choices,
    shuffled,
)
from lachesis.pipeline.tasks.columns import column
from lachesis.schemas.errors import ConfigError

__all__ = ["ChoiceColumns"]

_MIN_ROWS_OF_ONE_LETTER = 20
"""With four choices, chance gives one letter to so many rows once in 10^11 data sets."""


class ChoiceColumns:
    """The columns with the choices of a question: one that holds all, or several of one choice, or list of them, each.

    If the column of the answer is among several, the choices are shuffled, because its place would show the answer.
    """

    def __init__(self, columns: str | Sequence[str], answer: str | None, form: AnswerForm | None) -> None:
        self.columns = [columns] if isinstance(columns, str) else list(columns)
        self._is_one = isinstance(columns, str)
        self._answer = answer
        if self._is_shuffled and form not in {None, "text"}:
            raise ConfigError(
                f'dataset: answer_form is "{form}", but the column of the answer, {answer!r}, is one of the choices, '
                "and so holds the text of the right one: leave answer_form out"
            )
        self._form: AnswerForm | None = "text" if self._is_shuffled else form
        self._from_zero = self._beyond = 0
        self._right: Counter[str] = Counter()
        self._rows = 0

    @property
    def _is_shuffled(self) -> bool:
        return not self._is_one and self._answer in self.columns

    def read(self, row: Mapping[str, Any], where: str) -> list[AnswerChoice]:
        """Return the choices of a row, in the order in which the prompt shows them."""
        if self._is_one:
            return read_choices(column(row, self.columns[0], where), where)
        found: list[Any] = []
        for name in self.columns:
            given = column(row, name, where)
            found.extend(given if isinstance(given, list) else [given])
        choices = read_choices(found, where)
        return shuffled(choices) if self._is_shuffled else choices

    def answer(self, value: Any, choices: Sequence[AnswerChoice], where: str) -> str | list[str]:
        """Return the letter of the right choice, or the letters, any of which is right."""
        if self._form is None and (number := counted_place(value, choices)) is not None:
            self._from_zero += number == 0
            self._beyond += number == len(choices)
            if number == len(choices):
                raise ConfigError(
                    f"{where}: its answer is the number of its choices, counted from 1: {number}; if all answers are "
                    'counted so, set answer_form = "number"'
                )
        try:
            letters = [letter_of(place) for place in find_right_choices(value, choices, self._form, where)]
        except ConfigError as error:
            if self._is_one or self._is_shuffled:
                raise
            raise ConfigError(f"{error}. If its own column is a choice, too, name it among `choices`") from error
        return letters[0] if len(letters) == 1 else letters

    def count(self, answer: Any) -> None:
        """Count the answer of a row that is used."""
        self._rows += 1
        self._right.update(answer if isinstance(answer, list) else [answer])

    def filled_in(self, row: Mapping[str, Any], lines: str) -> dict[str, Any]:
        """Return a row with the lines of its choices where a template names them."""
        own = {self.columns[0]: lines} if self._is_one else {}
        return {**row, "choices": lines, **own}

    def are_in(self, names: Sequence[str]) -> bool:
        """Whether a template that names these columns shows the choices itself."""
        shown = {"choices"} | ({self.columns[0]} if self._is_one else set())
        if shown & set(names):
            return True
        one_by_one = not self._is_one and set(self.columns) <= set(names)
        if one_by_one and self._is_shuffled:
            raise ConfigError(
                "dataset: the template names the choices one by one, in an order that tells the answer: write "
                "{choices} for them, shuffled"
            )
        return one_by_one

    def doubts(self) -> Iterator[str]:
        """Yield the messages to report. Raises `ConfigError` if the answers count from 1, not from 0."""
        if self._beyond and not self._from_zero:
            raise ConfigError(
                f"{self._beyond} answers are the number of their choices, and none is 0, so they seem to count from 1: "
                'set answer_form = "number", or "index" if they count from 0'
            )
        if len(self._right) == 1 and self._rows >= _MIN_ROWS_OF_ONE_LETTER:
            yield (
                f"the right choice of all {self._rows} rows is {', '.join(self._right)}, so a model learns the letter. "
                "Give the columns of the choices one by one, that of the answer among them, to have them shuffled"
            )
