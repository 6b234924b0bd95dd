"""Brings the tests of a program into one form, from the various forms of data sets.

The result is a list of {input, output}, for a program that reads standard input, or of {assert}, Python that is run
after the code; imports that the prompt or the judge of the data set provides are in `before`. It accepts such a list; a
list of texts, or one text, of assertions (MBPP); `check` of a function (HumanEval); functions `test_...` and unittest's
cases; {inputs, outputs} (APPS, TACO), also with the name of a function to call; other names of the same (`stdin`,
`expected_output`...); a whole row; any of these as JSON text. A test that could only pass, or only fail, whatever the
program is, is refused.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lachesis.pipeline.tasks.assertions import CALLED_IMPORTS, calling_test, imports_of, runnable_test
from lachesis.pipeline.tasks.literals import literal_in
from lachesis.schemas.errors import ConfigError

__all__ = ["program_tests"]

_INPUT = ("input", "stdin", "inputs", "in")
_OUTPUT = ("output", "stdout", "expected_output", "expected_stdout", "outputs", "out")
_ASSERT = ("assert", "assertion", "test")
_FUNCTION = ("fn_name", "func_name", "entry_point", "function_name")
_ROW = ("tests", "test_list", "input_output", "test")
"""Columns of a whole row that hold its tests."""
_FUNCTIONAL = frozenset({"functional", "function_call", "call_based"})
_SETUP = ("test_setup_code", "test_imports")
_MAX_TESTS = 4096
_FORMS = "{input, output} or {assert}, as text"
_NAME = re.compile(r"[^\W\d]\w*(?:\(\))?(?:\.[^\W\d]\w*)*")
_ZLIB = b"\x78"


def program_tests(value: Any, row: Mapping[str, Any] | None = None) -> list[dict[str, str]]:
    """Return the tests.

    `row`: the row that they are in; the name of the function and a set-up are read from it. Raises `ConfigError` if
    there are none, or if they cannot be read.
    """
    row = dict(row or {})
    value = _decoded(value)
    if isinstance(value, Mapping):
        inner = next((name for name in _ROW if name in value), None)
        if inner is not None and (inner != "test" or _function(value) is not None):
            return program_tests(value[inner], row | dict(value))
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping):
        value = _columns(value)
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not 0 < len(value) <= _MAX_TESTS:
        raise ConfigError(f"tests of code are a list of 1 to {_MAX_TESTS} of {_FORMS}; these are {value!r:.120}")
    return [_test(one, row) for one in value]


def _decoded(value: Any) -> Any:
    """Return the JSON value of a text, or the text if it is no JSON. Raises ConfigError for a packed one."""
    if not isinstance(value, str):
        return value
    if value.lstrip()[:1] in {"[", "{", '"'}:
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return literal_in(value) or value
    if _is_packed(value):
        raise ConfigError(
            "tests of code are packed (base64 of zlib, as LiveCodeBench's private_test_cases), and in them is a "
            "pickle, which may run code when it is read: unpack them once yourself and write them as JSON, or use "
            "public_test_cases"
        )
    return value


def _is_packed(value: str) -> bool:
    try:
        start = base64.b64decode(value.strip()[:64], validate=True)
    except (binascii.Error, ValueError):
        return False
    return start[:1] == _ZLIB and len(start) > 1 and (start[0] * 256 + start[1]) % 31 == 0


def _columns(value: Mapping[str, Any]) -> Any:
    """Return the tests of a mapping: one, or a list for each part of a test."""
    inputs, outputs = _first(value, _INPUT), _first(value, _OUTPUT)
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        return [value]
    if len(inputs) != len(outputs):
        raise ConfigError(f"tests of code: {len(inputs)} inputs and {len(outputs)} outputs")
    function = _function(value)
    if function is not None:
        return [{"fn_name": function, "input": one, "output": two} for one, two in zip(inputs, outputs, strict=True)]
    return [{"input": _text(one), "output": _text(two)} for one, two in zip(inputs, outputs, strict=True)]


def _test(value: Any, row: Mapping[str, Any]) -> dict[str, str]:
    if isinstance(value, str) and value.strip():
        return _assertion(value, row)
    if isinstance(value, Mapping):
        code, given, wanted = (_first(value, names) for names in (_ASSERT, _INPUT, _OUTPUT))
        kind = str(value.get("testtype") or value.get("type") or "")
        if isinstance(code, str):
            return _assertion(code, {**row, **value})
        function = _function(value)
        if function is None and kind in _FUNCTIONAL:
            function = _function(row)
            if function is None:
                raise ConfigError(
                    f"a test of code is of type {kind!r:.40} and names no function: give fn_name in each test, or "
                    "func_name, entry_point or metadata beside the tests"
                )
        if function is not None:
            return {"assert": calling_test(function, given, wanted), "before": CALLED_IMPORTS}
        if isinstance(wanted, str | list) and isinstance(given, str | list | None):
            return {"input": _text(given or ""), "output": _text(wanted)}
    raise ConfigError(f"a test of code has {_FORMS}; this one is {value!r:.200}")


def _assertion(code: str, row: Mapping[str, Any]) -> dict[str, str]:
    setup = [_first(row, (name,)) for name in _SETUP]
    lines = "\n".join("\n".join(one) if isinstance(one, list) else str(one) for one in setup if one)
    function = _function(row)
    test = {"assert": runnable_test(code, lines, function)}
    before = _first(row, ("before",)) or (imports_of(row.get("prompt")) if function is not None else "")
    return test | ({"before": before} if before else {})


def _function(row: Mapping[str, Any]) -> str | None:
    """Return the name of the function that tests call; None if they do not say."""
    found = _first(row, _FUNCTION)
    if found is None and (about := _decoded_object(row.get("metadata"))):
        found = _first(about, _FUNCTION)
    if found is None or found == "":
        return None
    if not isinstance(found, str) or _NAME.fullmatch(found) is None:
        raise ConfigError(f"tests of code call a function by name, and {found!r:.60} is no name of one")
    return found


def _decoded_object(value: Any) -> Mapping[str, Any]:
    found = _decoded(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
    return found if isinstance(found, Mapping) else {}


def _first(value: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((value[name] for name in names if name in value), None)


def _text(value: Any) -> str:
    """Return a text, which may be given as its lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ConfigError(f"a test of code has {_FORMS}; this one has {value!r:.120}")
