"""Reads the reference answer of each row of a data set, or refuses the row and says what to set. Pure."""

from collections.abc import Mapping
from typing import Any

from lachesis.pipeline.tasks.columns import column, is_blank, is_missing
from lachesis.pipeline.tasks.conversations import Conversation, read_conversation
from lachesis.pipeline.tasks.references import reference_text
from lachesis.pipeline.tasks.row_stores import DatasetRow
from lachesis.pipeline.tasks.thoughts import answer_part, thought_spans
from lachesis.pipeline.tasks.transcripts import read_transcript
from lachesis.schemas.errors import ConfigError

__all__ = ["DEFAULT_ANSWER", "AnswerColumn"]

DEFAULT_ANSWER = "answer"
"""The column of the answer, unless the parameter `answer` names another."""
_TRUTH_VALUES = frozenset({"true", "false"})
"""As tables have them, in any case."""


class AnswerColumn:
    """The column `name`. `after`: the answer is what follows this text. `words`: the answers for what it holds."""

    def __init__(self, name: str, after: str | None, words: Mapping[str, str] | None) -> None:
        self._name = name
        self._after = after
        self._words = words

    def value(self, row: DatasetRow, asked: Conversation, where: str) -> Any:
        """Return what the row has for an answer: a value, or a list of which any is right.

        Without a column of the default name, it is what the assistant says at the end of the prompt. Raises
        `ConfigError` if it is missing.
        """
        if self._name == DEFAULT_ANSWER and DEFAULT_ANSWER not in row and asked.answer is not None:
            value: Any = asked.answer
        elif self._name == DEFAULT_ANSWER and DEFAULT_ANSWER not in row and asked.is_chat:
            raise ConfigError(
                f"{where}: it has no column 'answer', and its prompt does not end in words of the assistant, which "
                "would be the answer; name the column of the answer, or set answer = ''"
            )
        else:
            value = column(row, self._name, where)
        if isinstance(value, str):
            value = read_transcript(value) or value
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            value = _last_said(value, self._name, where)  # a completion, or a conversation, as chat messages
        if is_blank(value):
            raise ConfigError(
                f"{where}: its answer is {value!r} ({type(value).__name__}), which is missing. Mend it: drop the row, "
                "or, if no rater needs answers, set answer = ''"
            )
        if isinstance(value, dict):
            inner = ", ".join(f'"{self._name}.{key}"' for key in list(value)[:4])
            raise ConfigError(
                f"{where}: its answer is {value!r:.60} (dict), and a reference is one text or number. Set answer = one "
                f"of {inner}; or, for a rater of your own that reads all of it, answer = '' and task = "
                f'{{ truth = "{self._name}" }}'
            )
        if self._words is None:
            return value
        if isinstance(value, list):
            return [self._word(one, where) for one in value if not is_missing(one)]
        return self._word(value, where)

    def texts(self, value: Any, where: str) -> str | list[str]:
        """Return the reference: a text, or several of which any is right."""
        if not isinstance(value, list):
            return self._one(value, where)
        known = [self._one(one, where) for one in value if not is_missing(one)]
        if not known:
            raise ConfigError(f"{where}: its answer is {value!r:.60} (list), an empty list. Mend it: drop the row")
        return known[0] if len(set(known)) == 1 else list(dict.fromkeys(known))

    def after_mark(self, value: Any, where: str) -> Any:
        """Return what the row has for an answer unchanged; with a mark before the answer, what follows it."""
        return value if self._after is None else self.texts(value, where)

    def _word(self, value: Any, where: str) -> str:
        given = str(value).lower() if isinstance(value, bool) else reference_text(value, where)
        words = self._words or {}
        found = words.get(given, words.get(given.lower()) if given.lower() in _TRUTH_VALUES else None)
        if found is None:
            known = ", ".join(map(repr, words))
            raise ConfigError(
                f"{where}: its answer is {given!r:.60}, for which answer_words has no word, only for {known}"
            )
        return found

    def _one(self, value: Any, where: str) -> str:
        if isinstance(value, bool):
            raise ConfigError(
                f"{where}: its answer is {value} (bool), and a reference is a text or number. Set the words of the "
                'right answer: answer_words = { true = "yes", false = "no" }'
            )
        text = reference_text(value, where)
        if text.startswith("<") and thought_spans(text)[:1] and thought_spans(text)[0][0] == 0:
            text = answer_part(text)  # what a model wrote
            if not text.strip():
                raise ConfigError(f"{where}: its answer is a thought without an answer behind it: {str(value)[-60:]!r}")
        if self._after is not None:
            _, mark, text = text.rpartition(self._after)
            if not mark or not text.strip():
                raise ConfigError(f"{where}: no answer follows {self._after!r} in {str(value)[-60:]!r}")
        return text.strip()


def _last_said(turns: list[Any], name: str, where: str) -> str | None:
    """Return the last text of the assistant in chat messages."""
    if not any("content" in turn or "value" in turn for turn in turns):
        inner = next(iter(turns[0]))
        raise ConfigError(
            f"{where}: its answer is {turns!r:.60} (list), of objects. Name the text in the first of them, answer = "
            f"\"{name}.0.{inner}\" say; or, for a rater of your own that reads all of them, set answer = '' and task = "
            f'{{ truth = "{name}" }}'
        )
    user = {"role": "user", "content": "-"}
    try:
        return read_conversation([user, *turns]).answer
    except ConfigError as error:
        raise ConfigError(f"{where}: its answer: {error}") from error
