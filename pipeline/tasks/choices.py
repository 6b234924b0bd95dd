"""Reads choices as data sets have them, and finds which of them an answer means. Pure.

Choices are a list of texts (MMLU), of texts with labels ("(A) 4", AGIEval) or of objects with labels; an object of
texts and labels (ARC, TruthfulQA), or of labels and texts (MedQA); or several columns (GPQA, SciQ). They are always
shown under the letters A, B, C..., and the answer is a letter. Guarantees that an answer that could mean two choices is
refused, never guessed.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from lachesis.pipeline.tasks.columns import is_blank, opened
from lachesis.pipeline.tasks.references import reference_text
from lachesis.schemas.errors import ConfigError

__all__ = [
    "AnswerChoice",
    "AnswerForm",
    "choice_lines",
    "counted_place",
    "find_right_choices",
    "letter_of",
    "read_choices",
    "shuffled",
]

AnswerForm = Literal["index", "number", "label", "text"]
"""How a column says which choice is right: by its place counted from 0, or from 1; by its label; or by its text."""

_MAX_CHOICES = 26
_TEXTS = ("text", "texts", "choices", "content", "value", "answer", "choice", "option", "options")
_LABELS = ("label", "labels", "key", "letter", "id", "choice_label")
_LABELLED = re.compile(
    r"\s*(?:\((?P<both>[A-Za-z]|\d{1,2})\)|(?P<one>[A-Za-z]|\d{1,2})\s?(?:\)|[.:](?=\s)))\s*(?P<text>\S.*)", re.DOTALL
)
_DRESSED_LABEL = re.compile(r"[(\[]?\s*(\w+)\s*[)\].:]?")
_WHOLE = re.compile(r"\d+(?:\.0+)?")


class AnswerChoice(msgspec.Struct, frozen=True):
    """One choice. `label`: what its row calls it; None: it has only its place."""

    text: str
    label: str | None = None
    is_number: bool = False
    """Whether it is a number in the data set, so that a number can mean it."""


def read_choices(value: Any, where: str) -> list[AnswerChoice]:
    """Return the choices in a column. Raises `ConfigError`, which says what was found instead."""
    value = opened(value)
    if isinstance(value, Mapping):
        found = list(_of_object(value, where))
    elif isinstance(value, list | tuple):
        found = [_of_one(one, where) for one in _without_end(value)]
    else:
        cure = "or, if the prompt shows the column as it stands, name it in `template` and leave `choices` out"
        raise ConfigError(f"{where}: its choices are {value!r:.60} ({type(value).__name__}): write a list; {cure}")
    found = _without_own_labels(found)
    if not 2 <= len(found) <= _MAX_CHOICES:
        given = f"{value!r:.60}, which is {len(found)}"
        raise ConfigError(f"{where}: its choices are {given}; a question has 2 to {_MAX_CHOICES}")
    return found


def find_right_choices(value: Any, choices: Sequence[AnswerChoice], form: AnswerForm | None, where: str) -> list[int]:
    """Return the places, from 0, of the choices that an answer means: each of a list of answers.

    A list of 0 and 1 as long as the choices marks the right ones. `form`: None: it is recognized. Raises `ConfigError`
    if the answer is none of the choices, or could be two.
    """
    if isinstance(value, list):
        if form is None and _is_mask(value, choices):
            value, form = [place for place, right in enumerate(value) if right], "index"
        if not value:
            raise ConfigError(f"{where}: its answer names none of its choices. Mend it: drop the row")
        return sorted({place for one in value for place in find_right_choices(one, choices, form, where)})
    found = _meanings(value, choices)
    if form is not None:
        found = {form: found.get(form, set())}
    else:  # places are counted from 0, and a row that labels its choices is answered by its labels
        other = {"number", "index"} if "label" in found else {"number"}
        found = {name: places for name, places in found.items() if name not in other}
    places = set[int]().union(*found.values())
    if len(places) == 1:
        return list(places)
    shown = f"its answer is {value!r:.60} ({type(value).__name__})"
    if not places:
        known = ", ".join(repr(one.text if one.label is None else one.label)[:24] for one in choices[:5])
        what = "which is none of its choices" if form is None else f"which is the {form} of none of its choices"
        raise ConfigError(f"{where}: {shown}, {what}, {known}")
    if len(found) == 1:
        raise ConfigError(f"{where}: {shown}, and {len(places)} of its choices are that. Mend it: drop the row")
    ways = " or ".join(f"the {name} of one" for name in found)
    raise ConfigError(f'{where}: {shown}, which may be {ways}: set answer_form = "index", "number", "label" or "text"')


def counted_place(value: Any, choices: Sequence[AnswerChoice]) -> int | None:
    """Return the number by which an answer means a choice; None if it means one otherwise."""
    digits = _digits(value)
    return None if digits is None or any(one.label is not None for one in choices) else digits


def choice_lines(choices: Sequence[AnswerChoice]) -> str:
    """Return the choices as the prompt shows them, one a line: "A. Paris"."""
    return "\n".join(f"{letter_of(place)}. {one.text}" for place, one in enumerate(choices))


def letter_of(place: int) -> str:
    """Return the letter of a choice by its place, from 0."""
    return chr(ord("A") + place)


def shuffled(choices: Sequence[AnswerChoice]) -> list[AnswerChoice]:
    """Return the choices in an order that depends on their texts alone, not on their order."""
    texts = "\n".join(sorted(one.text for one in choices))

    def rank(choice: AnswerChoice) -> bytes:
        return hashlib.blake2b(f"{texts}\n\n{choice.text}".encode("utf-8", "surrogatepass"), digest_size=8).digest()

    return sorted(choices, key=rank)


def _of_object(value: Mapping[str, Any], where: str) -> Iterator[AnswerChoice]:
    texts = next((value[name] for name in _TEXTS if isinstance(value.get(name), list)), None)
    if texts is None:
        for label, text in value.items():
            if not is_blank(text):
                yield msgspec.structs.replace(_of_one(text, where), label=str(label))
        return
    given = next((value[name] for name in _LABELS if isinstance(value.get(name), list)), None)
    labels = None if given is None else [str(one).strip() for one in given]
    if labels is not None and len(labels) != len(texts):
        raise ConfigError(f"{where}: its choices are {len(texts)} texts and {len(labels)} labels")
    if labels is None or len(set(labels)) < len(labels):  # marks of the right ones
        labels = []
    for place, text in enumerate(texts if labels else _without_end(texts)):
        one = _of_one(text, where)
        yield msgspec.structs.replace(one, label=labels[place]) if labels else one


def _of_one(value: Any, where: str) -> AnswerChoice:
    label = None
    if isinstance(value, Mapping):
        named = next((value[name] for name in _LABELS if value.get(name) is not None), None)
        label = None if named is None else str(named).strip()
        value = next((value[name] for name in _TEXTS if value.get(name) is not None), None)
    if isinstance(value, bool):
        value = str(value)
    if is_blank(value) or not isinstance(value, str | int | float):
        raise ConfigError(
            f"{where}: one of its choices is {value!r:.60} ({type(value).__name__}), neither text nor number"
        )
    return AnswerChoice(reference_text(value, where), label, not isinstance(value, str))


def _without_end(values: Sequence[Any]) -> list[Any]:
    """Return values without the missing ones at their end, as tables have them where there are fewer choices."""
    kept = list(values)
    while kept and is_blank(kept[-1]):
        kept.pop()
    return kept


def _without_own_labels(choices: list[AnswerChoice]) -> list[AnswerChoice]:
    """Return choices whose texts begin with labels, "(A) 4", with these as labels."""
    if any(one.label is not None or one.is_number for one in choices):
        return choices
    found = [match for one in choices if (match := _LABELLED.fullmatch(one.text)) is not None]
    labels = [match["both"] or match["one"] for match in found]
    places = range(len(choices))
    rows = (map(letter_of, places), (letter_of(one).lower() for one in places), (str(one + 1) for one in places))
    if len(found) < len(choices) or all(labels != list(row) for row in rows):
        return choices
    return [AnswerChoice(match["text"], label) for match, label in zip(found, labels, strict=True)]


def _is_mask(value: list[Any], choices: Sequence[AnswerChoice]) -> bool:
    return len(value) == len(choices) and all(isinstance(one, bool | int | float) and one in {0, 1} for one in value)


def _meanings(value: Any, choices: Sequence[AnswerChoice]) -> dict[str, set[int]]:
    """Return the places of the choices that an answer may mean, by the form that it then has."""
    found: dict[str, set[int]] = {}
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return found
    is_text = isinstance(value, str)
    text = _one_spelling(reference_text(value, ""))
    dressed = _DRESSED_LABEL.fullmatch(text)
    names = {text.casefold(), *([dressed[1].casefold()] if dressed is not None else [])}
    whole = _LABELLED.fullmatch(text) if is_text else None
    has_labels = any(one.label is not None for one in choices)
    for place, one in enumerate(choices):
        label = (letter_of(place) if one.label is None else one.label).casefold()
        said = _one_spelling(one.text)
        if (label in names and (has_labels or is_text)) or (
            whole is not None and (whole["both"] or whole["one"]).casefold() == label and whole["text"] == said
        ):
            found.setdefault("label", set()).add(place)
        if said == text and (is_text or one.is_number):
            found.setdefault("text", set()).add(place)
    number = _digits(value)
    if number is not None:
        for name, place in (("index", number), ("number", number - 1)):
            if 0 <= place < len(choices):
                found[name] = {place}
    return found


def _digits(value: Any) -> int | None:
    """Return the whole number that an answer is: 2, 2.0, "2", "(2)"."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    dressed = _DRESSED_LABEL.fullmatch(text := str(value).strip())
    digits = text if dressed is None else dressed[1]
    return int(digits.partition(".")[0]) if digits.isascii() and _WHOLE.fullmatch(digits) else None


def _one_spelling(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())
