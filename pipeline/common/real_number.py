"""Reads one real number that a user's code returned: a reward, a rating or a score."""

import math
import numbers
import re
from typing import Any

__all__ = ["finite_number", "real_number", "without_addresses"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def real_number(value: Any) -> float:
    """Return `value` as a float: whatever Python, NumPy, torch or `decimal` take for one real number.

    A bool is 0 or 1; an array or tensor of one element is that element. Raises ValueError, which begins with the
    value, for anything else: texts, complex numbers, arrays of several elements, None. NaN and infinities are returned.
    """
    if type(value) is float:
        return value
    kind = getattr(getattr(value, "dtype", None), "kind", "")  # of NumPy: c complex, S U texts, M m times, V records
    is_complex = kind == "c" or getattr(getattr(value, "dtype", None), "is_complex", False)  # the latter of torch
    is_complex = is_complex or (isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real))
    if isinstance(value, str | bytes) or not hasattr(value, "__float__") or is_complex or kind in {*"SUMmV"}:
        raise ValueError(f"{_shown(value)}, which is not a real number")
    shape = getattr(value, "shape", ())
    if shape and math.prod(shape) != 1:
        raise ValueError(f"{_shown(value)}, which holds {math.prod(shape)} numbers, not one")
    try:
        if hasattr(value, "detach"):
            value = value.detach()
        return float(value.item() if shape else value)
    except (TypeError, ValueError, OverflowError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"{_shown(value)}, which is not a real number: {error}") from error


def finite_number(value: Any) -> float:
    """Return `value` as `real_number` does. Raises ValueError for NaN and infinities, too."""
    number = real_number(value)
    if not math.isfinite(number):
        raise ValueError(f"{number}, which is not finite")
    return number


def without_addresses(text: str) -> str:
    """Return a text without the places of objects in memory, which make two texts of one failure."""
    return _ADDRESS.sub("", text)


def _shown(value: Any) -> str:
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{without_addresses(repr(value)):.80} of type {name}"
