"""Writes the Python code that tests a program: calls of a function, and tests that are only defined.

A test that asserts nothing would pass every program, and one that does not compile would pass none: both are refused.
"""

import ast
import builtins
import re
import sys
import warnings
from typing import Any

import msgspec

from lachesis.schemas.errors import ConfigError

__all__ = ["CALLED_IMPORTS", "called_names", "calling_test", "imported_packages", "imports_of", "runnable_test"]

_CALLER = """\
import json as _json
def _plain(value):
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return {{str(key): _plain(one) for key, one in value.items()}} if isinstance(value, dict) else value
_test = _json.loads({content!r})
_function = globals()["Solution"]() if "Solution" in globals() and {name!r} not in globals() else None
_function = globals()[{name!r}] if _function is None else getattr(_function, {name!r})
_given = _plain(_function(*_test["given"]))
assert any(_given == one for one in _test["wanted"]), _given
"""
CALLED_IMPORTS = """\
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re, string, sys
from typing import *
from math import *
from builtins import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
"""
"""Imports that judges of data sets with functions put before the code: `class Solution` uses `List` without an
import."""
_IMPORT = re.compile(r"import \w|from [\w.]+ import [\w*]")
_IMPORTABLE = 'import sys as _sys; _sys.modules["solution"] = _sys.modules["__main__"]\n'
_NO_MAIN = "import unittest as _unittest; _unittest.main = lambda *_, **__: None\n"
_UNITTEST = """
import io as _io
_suite = _unittest.TestSuite(map(_unittest.defaultTestLoader.loadTestsFromTestCase, [{cases}]))
assert _unittest.TextTestRunner(_io.StringIO()).run(_suite).wasSuccessful()
"""


def calling_test(function: str, given: Any, wanted: Any) -> str:
    """Return the test that calls a function, or a method of `Solution`, and compares what it returns.

    `given` is a list of arguments, or a text with one in JSON on each line, and then `wanted` is JSON as well. As in
    APPS' own judge, a list of one value also stands for that value. Raises `ConfigError` if they have another form.
    """
    if isinstance(given, str):
        try:
            given = [msgspec.json.decode(line) for line in given.splitlines() if line.strip()]
            wanted = [msgspec.json.decode(wanted)]
        except (msgspec.DecodeError, TypeError) as error:
            raise ConfigError(
                f"a test of code calls {function!r:.60} with what is no JSON: {given!r:.60} and {wanted!r:.60}: {error}"
            ) from error
    else:
        wanted = [wanted, *wanted] if isinstance(wanted, list) and len(wanted) == 1 else [wanted]
    if not isinstance(given, list):
        raise ConfigError(
            f"a test of code calls {function!r:.60} with {given!r:.60}; give a list of arguments, or one in JSON a line"
        )
    function = function.rpartition(".")[2]
    content = msgspec.json.encode({"given": given, "wanted": wanted}).decode()
    return _CALLER.format(name=function, content=content)


def runnable_test(code: str, setup: str, function: str | None) -> str:
    """Return a test with the code that runs it.

    `setup` goes before it; `function`: the argument of `check`. Raises `ConfigError` if it could only pass, or only
    fail.
    """
    tree = _tree(code)
    body = f"{setup}\n{code}" if setup and not code.startswith(setup) else code
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if any(isinstance(node, ast.ImportFrom) and node.module == "solution" for node in ast.walk(tree)):
        body = body if body.startswith(_IMPORTABLE) else _IMPORTABLE + body
    cases = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and _is_case(node)]
    tests = {name: node for name, node in defined.items() if name.startswith("test") and name not in calls}
    if cases and attributes.isdisjoint({"run", "loadTestsFromTestCase"}):
        return _NO_MAIN + body + _UNITTEST.format(cases=", ".join(cases))
    if "check" in defined and "check" not in calls:
        if function is None:
            raise ConfigError(
                "a test of code defines check(candidate), as HumanEval's do, and does not say which function to check: "
                "give entry_point beside it, or end it with check(NAME)"
            )
        return f"{body}\ncheck({function})\n"
    if tests:
        needing = [name for name, node in tests.items() if node.args.args or node.decorator_list]
        if needing:
            raise ConfigError(
                f"a test of code, {needing[0]!r:.60}, is written for pytest (it has arguments or a decorator), and is "
                "run without it: write it as plain assertions"
            )
        return "\n".join([body, *(f"{name}()" for name in tests), ""])
    if not any(isinstance(node, ast.Assert | ast.Raise) or _is_call(node) for node in ast.walk(tree)):
        raise ConfigError(
            f"a test of code asserts nothing, so that every program would pass: {code.strip()!r:.120}; write `assert`"
        )
    return body


def imported_packages(code: str) -> set[str]:
    """Return the packages outside the standard library that a test always imports."""
    found: set[str] = set()
    for node in _tree(code).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"solution"}


def called_names(code: str) -> set[str]:
    """Return the names that a test takes from the program: those that it neither defines nor imports."""
    read, bound = set[str](), set(dir(builtins))
    for node in ast.walk(_tree(code)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module == "solution":
            read |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "globals()":
            read.add(ast.unparse(node.slice).strip("'"))
    return read - bound


def imports_of(prompt: Any) -> str:
    """Return the imports of a prompt that begins a program, as HumanEval's; "" without any."""
    lines = prompt.splitlines() if isinstance(prompt, str) else []
    try:
        return ast.unparse(_tree("\n".join(line for line in lines if _IMPORT.match(line))))
    except ConfigError:
        return ""


def _tree(code: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ConfigError(
            f"a test of code is no Python, so that no program could pass: {error}: {code.strip()!r:.120}"
        ) from error


def _is_case(node: ast.ClassDef) -> bool:
    return any("TestCase" in ast.dump(base) for base in node.bases)


def _is_call(node: ast.AST) -> bool:
    """Return whether a statement is a call, which may raise."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
