"""Fits named arguments from a configuration or a tool call to a callable by its annotations."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.common.user_code import argument_problem
from lachesis.pipeline.tasks.literals import literal_in

__all__ = ["bind_arguments"]


def bind_arguments(function: Callable[..., Any], given: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return `given` converted to the types `function` declares.

    A parameter without annotation takes anything.

    `strict`: whether a value must have its type already ("5" is then no int).
    Raises ValueError, which names the argument that is unknown, missing or of the wrong type.
    """
    problem = argument_problem(function, given)
    if problem is not None:
        raise ValueError(problem)
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    bound = {}
    for name, value in given.items():
        hint = hints.get(name, Any)
        try:
            bound[name] = _converted(value, hint, strict=strict)
        except msgspec.ValidationError as error:
            allowed = nearest(str(value), map(str, choices)) if (choices := _choices(hint)) else ""
            raise ValueError(f"argument {name!r}: {error}{allowed}") from error
    return bound


def _converted(value: Any, hint: Any, *, strict: bool) -> Any:
    """Return a value converted to its annotation. Unless `strict`, a list or an object may come as its text."""
    try:
        return msgspec.convert(value, hint, strict=strict)
    except msgspec.ValidationError:
        found = literal_in(value) if isinstance(value, str) and not strict else None
        if found is None:
            raise
        return msgspec.convert(found, hint, strict=strict)


def _choices(hint: Any) -> list[Any]:
    """Return the values that an annotation lists, also if it has other types."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) if get_origin(part) is Literal for choice in get_args(part)]
