"""Turns the reference answer of a task into the text that raters compare with.

A list of answers means that any of them is right. Guarantees that a value that is no answer (a dictionary, bytes, a
truth value, nan, an empty text, a list in a list) is refused, with a message that says what came and how to fix it.
Raters and the environment `dataset` share this one rule.
"""

import math
from decimal import Decimal
from typing import Any

from lachesis.pipeline.tasks.literals import literal_in
from lachesis.schemas.errors import ConfigError

__all__ = ["INVISIBLE", "holds_list", "is_absent_text", "reference_text", "reference_texts"]

_MAX_PLAIN_EXPONENT = 20
"""Powers of ten up to which a number is written without an exponent."""
INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u200e\u200f"
"""Characters without a width, marks of direction among them, which copied texts have at their ends."""
_ABSENT = frozenset({"nan", "NaN", "NAN", "<NA>", "NaT"})
"""Texts that data frames print for a missing value."""


def reference_texts(value: Any, where: str) -> list[str]:
    """Return the accepted references in the form of `reference_text`: those of a list, or one.

    `where` names the task. Raises `ConfigError` if one is no single answer, or the list is empty.
    """
    if not isinstance(value, list | tuple) or not value:
        return [reference_text(value, where)]
    return list(dict.fromkeys(reference_text(one, where) for one in value))


def reference_text(value: Any, where: str) -> str:
    """Return a reference as a person would write it: 18 for 18.0, 0.00001 for 1e-05.

    `where` names the task. Raises `ConfigError` if the value is no single answer.
    """
    if isinstance(value, bool):
        raise ConfigError(_refused(where, value, "write the words of the right answer instead, 'yes' or 'True' say"))
    if isinstance(value, bytes | bytearray | memoryview):
        raise ConfigError(_refused(where, value, "decode it to text: value.decode()"))
    if isinstance(value, dict):
        raise ConfigError(_refused(where, value, "give the text or the number in it"))
    if isinstance(value, list | tuple | set | frozenset):
        cure = "give a list of texts, of which any is right" if value else "it is empty: drop the row, or give None"
        raise ConfigError(_refused(where, value, cure))
    text = (
        _number_text(value) if isinstance(value, int | float | Decimal) else str(value).strip().strip(INVISIBLE).strip()
    )
    if text is None or text in _ABSENT:
        raise ConfigError(_refused(where, value, "it is a missing value: drop the row, or give no answer (None)"))
    if not text:
        raise ConfigError(_refused(where, value, "it is empty: drop the row, or give no answer (None)"))
    return text


def is_absent_text(text: str) -> bool:
    """Return whether a text is what data frames print for a missing value."""
    return text in _ABSENT


def holds_list(value: Any) -> bool:
    """Return whether an answer is the text of a list of texts or objects, as JSON or as printed.

    It is unclear then whether the list or its content is meant: '["a", "b"]' is the answer if the task requests JSON.
    """
    found = literal_in(value) if isinstance(value, str) else None
    return isinstance(found, list) and bool(found) and all(isinstance(one, str | dict) for one in found)


def _refused(where: str, value: Any, cure: str) -> str:
    kind = type(value).__name__
    return f"{where}: its answer is {value!r:.60} ({kind}), but a reference is one text or number. Mend it: {cure}"


def _number_text(value: float | Decimal) -> str | None:
    """Return a number in digits, None if it is not finite."""
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return None
    exact = value if isinstance(value, Decimal) else Decimal(float.__repr__(value))
    if exact == 0:
        return "0"
    if abs(exact.adjusted()) > _MAX_PLAIN_EXPONENT:
        return str(exact.normalize())
    text = format(exact, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
