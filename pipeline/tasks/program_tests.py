"""Brings the tests of a program into one form, from the forms that data sets have them in.

Out: a list of {input, output}, for a program that reads standard input, or of {assert}, Python that is run after the
code. In: such a list; a list of texts, or one text, of assertions (MBPP); {inputs, outputs} (APPS, TACO); other names
of the same (`stdin`, `expected_output`...); any of it as JSON text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lachesis.schemas.errors import ConfigError

__all__ = ["program_tests"]

_INPUT = ("input", "stdin", "inputs", "in")
_OUTPUT = ("output", "stdout", "expected_output", "expected_stdout", "outputs", "out")
_ASSERT = ("assert", "assertion", "test")
_MAX_TESTS = 4096
_FORMS = "{input, output} or {assert}, as text"


def program_tests(value: Any) -> list[dict[str, str]]:
    """Return the tests. Raises `ConfigError` where they are none, or call a function by name."""
    value = _decoded(value)
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping):
        value = _columns(value)
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not 0 < len(value) <= _MAX_TESTS:
        raise ConfigError(f"tests of code are a list of 1 to {_MAX_TESTS} of {_FORMS}; these are {value!r:.120}")
    return [_test(one) for one in value]


def _decoded(value: Any) -> Any:
    """Return what a text says in JSON, or the text if it is none."""
    if not isinstance(value, str) or value.lstrip()[:1] not in {"[", "{", '"'}:
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


def _columns(value: Mapping[str, Any]) -> Any:
    """Return the tests of a mapping: one, or a list for each part of a test."""
    if value.get("fn_name"):
        raise ConfigError(
            f"tests of code that call the function {value['fn_name']!r:.60} by name cannot be run as they are; give "
            "them as {assert}"
        )
    inputs, outputs = _first(value, _INPUT), _first(value, _OUTPUT)
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        return [value]
    if len(inputs) != len(outputs):
        raise ConfigError(f"tests of code: {len(inputs)} inputs and {len(outputs)} outputs")
    return [{"input": _text(one), "output": _text(other)} for one, other in zip(inputs, outputs, strict=True)]


def _test(value: Any) -> dict[str, str]:
    if isinstance(value, str) and value.strip():
        return {"assert": value}
    if isinstance(value, Mapping):
        code, given, wanted = (_first(value, names) for names in (_ASSERT, _INPUT, _OUTPUT))
        if isinstance(code, str):
            return {"assert": code}
        if isinstance(wanted, str | list) and isinstance(given, str | list | None):
            return {"input": _text(given or ""), "output": _text(wanted)}
    raise ConfigError(f"a test of code has {_FORMS}; this one is {value!r:.200}")


def _first(value: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((value[name] for name in names if name in value), None)


def _text(value: Any) -> str:
    """Return a text, or lines of it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ConfigError(f"a test of code has {_FORMS}; this one has {value!r:.120}")
