"""Fits named arguments from a configuration or a tool call to a callable by its annotations."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

__all__ = ["bind_arguments", "nearest"]


def bind_arguments(function: Callable[..., Any], given: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return `given` converted to the types `function` declares.

    A parameter without annotation takes anything.

    `strict`: whether a value must have its type already ("5" is then no int).
    Raises ValueError naming the argument that is unknown, missing or of the wrong type.
    """
    named, any_name = {}, False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            any_name = True
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            named[name] = parameter
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    for name in given:
        if name not in named and not any_name:
            raise ValueError(f"unknown argument {name[:60]!r}{nearest(name, named)}")
    missing = [name for name, parameter in named.items() if parameter.default is parameter.empty and name not in given]
    if missing:
        raise ValueError(f"missing argument{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}")
    bound = {}
    for name, value in given.items():
        hint = hints.get(name, Any) if name in named else Any
        try:
            bound[name] = msgspec.convert(value, hint, strict=strict)
        except msgspec.ValidationError as error:
            allowed = f"; known: {', '.join(map(str, choices))}" if (choices := _choices(hint)) else ""
            raise ValueError(f"argument {name!r}: {error}{allowed}") from error
    return bound


def _choices(hint: Any) -> list[Any]:
    """Return the values that an annotation lists, alone or beside other types."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) if get_origin(part) is Literal for choice in get_args(part)]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what to say after an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else "; none are known"
