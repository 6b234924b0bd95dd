"""Reads a list or a dictionary in a text, as Python prints it or as JSON has it. Pure."""

import ast
import warnings
from typing import Any

import msgspec

__all__ = ["literal_in"]


def literal_in(text: str) -> list[Any] | dict[Any, Any] | None:
    """Return the list or the dictionary that a text represents; None if it is neither."""
    text = text.strip()
    if text[:1] + text[-1:] not in {"[]", "{}"}:
        return None
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "\d" in a text
                found = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None
    return found if isinstance(found, list | dict) else None
