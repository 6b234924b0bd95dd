"""Keeps reasoning-gym's scorers from running answers as Python.

Some of its datasets hand the answer, or a field of the task, to `eval` or to sympy's parser, which is `eval` as well.
So the text of a model or a message would run in the scorer. This module gives each module of reasoning-gym an `eval`
that knows values and arithmetic alone, and a parser that takes formulas alone.
"""

import ast
import operator
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["evaluate", "guard_reasoning_gym", "parse_formula"]

_MAX_CHARS = 20_000
_MAX_EXPONENT = 4096
"""Of a power or shift; the datasets' own arithmetic stays far below."""
_MAX_BITS = 8 * _MAX_EXPONENT
"""Of a whole number. A larger one is not computed either: Python holds all threads while it computes one."""
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}
_TOKEN = re.compile(r"\s*(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?P<name>[A-Za-z][A-Za-z0-9_]*)|\*\*|[-+*/^(),!])")
_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc", "atan2", "sinh", "cosh",
    "tanh", "coth", "sech", "csch", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "cbrt", "root", "Abs", "abs",
    "sign", "factorial", "binomial", "floor", "ceiling", "gamma", "erf", "erfc", "Rational", "Integer", "pi", "oo",
    "zoo", "nan", "alpha", "beta", "theta", "phi", "mu",
})  # fmt: skip
_VARIABLE = re.compile(r"[A-Za-z]\d{0,3}")


def evaluate(text: object, *_: object) -> Any:
    """Return the value of a text of numbers, texts, lists and arithmetic.

    Raises `ValueError` for all else.
    """
    if not isinstance(text, str) or len(text) > _MAX_CHARS:
        raise ValueError("no value")
    return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.expr) -> Any:
    found: Any
    match node:
        case ast.Constant(value=found):
            pass
        case ast.List(elts=parts):
            found = [_value(part) for part in parts]
        case ast.Tuple(elts=parts):
            found = tuple(_value(part) for part in parts)
        case ast.Set(elts=parts):
            found = {_value(part) for part in parts}
        case ast.Dict(keys=keys, values=values) if None not in keys:
            found = {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.UnaryOp(op=unary, operand=operand) if type(unary) in _UNARY:
            found = _UNARY[type(unary)](_number(operand))
        case ast.BinOp(left=left, op=binary, right=right) if type(binary) in _BINARY:
            found = _binary(binary, _number(left), _number(right))
        case _:
            raise ValueError(f"no value: {type(node).__name__}")
    return found


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Pow | ast.LShift) and not abs(right) <= _MAX_EXPONENT:
        raise ValueError("too large an exponent")
    if isinstance(op, ast.Pow) and isinstance(left, int) and left.bit_length() * abs(right) > _MAX_BITS:
        raise ValueError("too large a power")
    return _BINARY[type(op)](left, right)


def _number(node: ast.expr) -> int | float:
    value = _value(node)
    if not isinstance(value, int | float) or (isinstance(value, int) and value.bit_length() > _MAX_BITS):
        raise ValueError("no number, or too large a one")
    return value


def parse_formula(text: object, *args: Any, **named: Any) -> Any:
    """Return sympy's expression of a formula: numbers, operators, variables and the usual functions.

    Raises `ValueError` for all else: sympy's parser runs it as Python.
    """
    from sympy.parsing.sympy_parser import parse_expr  # type: ignore[import-untyped]

    check_formula(text)
    return parse_expr(text, *args, **named)


def check_formula(text: object) -> None:
    """Raise `ValueError` if a text is more than a formula."""
    if not isinstance(text, str) or len(text) > _MAX_CHARS:
        raise ValueError("no formula")
    at, plain = 0, text.strip()
    while at < len(plain):
        found = _TOKEN.match(plain, at)
        if found is None:
            raise ValueError(f"no formula: {plain[at : at + 20]!r}")
        name = found["name"]
        if name is not None and name not in _FUNCTIONS and _VARIABLE.fullmatch(name) is None:
            raise ValueError(f"no name of a formula: {name[:20]!r}")
        at = found.end()


class _GuardedSympy(ModuleType):
    """Stands for sympy in modules of reasoning-gym: with a parser that takes formulas alone."""

    parse_expr = staticmethod(parse_formula)

    def __getattr__(self, name: str) -> Any:
        import sympy  # type: ignore[import-untyped]

        return _sympify if name == "sympify" else getattr(sympy, name)


def _sympify(value: Any, *args: Any, **named: Any) -> Any:
    import sympy

    if isinstance(value, str):
        check_formula(value)
    return sympy.sympify(value, *args, **named)


def guard_reasoning_gym() -> None:
    """Replace, in each module of reasoning-gym that is imported, what would run a text as Python."""
    import sympy
    from sympy.parsing import sympy_parser  # type: ignore[import-untyped]

    guarded = _GuardedSympy("sympy")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "reasoning_gym" or module is None:
            continue
        vars(module).setdefault("eval", evaluate)
        for key, value in list(vars(module).items()):
            if value is sympy:
                setattr(module, key, guarded)
            elif value is sympy_parser.parse_expr:
                setattr(module, key, parse_formula)
            elif value is sympy.sympify:
                setattr(module, key, _sympify)
