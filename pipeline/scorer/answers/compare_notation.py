"""Brings two answers into one notation: intervals and inequalities, vectors and tuples."""

import re
from fractions import Fraction

__all__ = ["of_one_kind", "same_notation"]

_LESS = r"(?P<{0}><|\\leq?(?:slant)?(?![A-Za-z])|\\lt(?![A-Za-z])|≤)"
_CHAIN = re.compile(
    r"\s*(?P<low>[^<>≤≥=,]+?)\s*" + _LESS.format("first") + r"\s*(?P<name>[A-Za-z])\s*" + _LESS.format("second")
    + r"\s*(?P<high>[^<>≤≥=,]+?)\s*"
)  # fmt: skip
_ONE_SIDED = re.compile(
    r"\s*(?P<name>[A-Za-z])\s*(?P<sign><|>|≤|≥|\\(?:leq?|geq?|lt|gt)(?:slant)?(?![A-Za-z]))\s*(?P<bound>[^<>≤≥=,]+?)\s*"
)
_MEMBER = re.compile(r"\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_INTERVALS = re.compile(r"\s*(?:\\left)?[(\[].*(?:\\right)?[)\]]\s*", re.DOTALL)
_MATRIX = re.compile(r"\s*\\begin\{(?P<kind>[pbvBV]?matrix)\}(?P<rows>.*)\\end\{(?P=kind)\}\s*", re.DOTALL)
_ANGLES = re.compile(
    r"\s*(?:\\left)?\s*(?:\\langle|⟨|<)\s*(?P<parts>[^<>]*?,[^<>]*?)\s*(?:\\right)?\s*(?:\\rangle|⟩|>)\s*"
)
_TUPLE = re.compile(r"\s*(?:\\left)?\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\s*")
_OUTWARD = re.compile(r"(?P<open>[\[\]])(?P<parts>[^\[\](){},;]+[,;][^\[\](){},;]+)(?P<close>[\[\]])")
"""]0, 1[ and [0, 1[, as in French and German"""
_CASES = re.compile(r"\s*\\begin\{cases\}(?P<rows>[^&]*)\\end\{cases\}\s*", re.DOTALL)
_SET = re.compile(r"\s*(?:\\left)?\s*\\\{.*\\\}\s*", re.DOTALL)


_BAR = r"(?:\\left)?(?:\||\\[lr]?vert(?![A-Za-z]))"
_NUMBER = r"\d+(?:\.\d+)?|\d+/\d+|\\[dt]?frac\{\d+\}\{\d+\}"
_DISTANCE = re.compile(
    rf"\s*{_BAR}\s*(?P<name>[A-Za-z])\s*(?:(?P<sign>[-+])\s*(?P<from>{_NUMBER}))?\s*"
    + _BAR.replace("left", "right")
    + rf"\s*{_LESS.format('less')}\s*(?P<most>{_NUMBER})\s*"
)
"""A distance that is bounded: |x - 3| < 2."""
_OPERATION = re.compile(r"\\(?:int|oint|lim|sum|prod|partial)(?![A-Za-z])")
"""What is calculated on the left: its equation is about the value on the right."""
_DERIVATIVE = re.compile(
    r"\s*(?:\\[dt]?frac\s*\{\s*d\s*(?P<above>[A-Za-z])\s*\}\s*\{\s*d\s*[A-Za-z]\s*\}|d(?P<plain>[A-Za-z])\s*/\s*d[A-Za-z]"
    r"|[A-Za-z]'+)\s*(?:\([A-Za-z]\))?\s*=(?P<value>[^=]+)"
)
"""What a derivative is said to be: dy/dx = 2x."""


def same_notation(gold: str, given: str) -> tuple[str, str]:
    """Return both answers in one notation, if either is in another one that means the same."""
    gold, given = (_between(_inward(_listed_cases(text))) for text in (gold, given))
    gold, given = _right_sides(gold, given)
    if bool(_MATRIX.fullmatch(gold)) != bool(_MATRIX.fullmatch(given)) or "angle" in gold + given:
        return _tuple(gold), _tuple(given)
    if _is_interval(gold) or _is_interval(given):
        return _interval(gold), _interval(given)
    return gold, given


def of_one_kind(gold: str, given: str) -> bool:
    """Return whether two answers can be the same: a set has no order and a tuple has one."""
    if _SET.fullmatch(gold):
        return not _is_tuple(given)
    if _is_tuple(gold):
        return not _SET.fullmatch(given)
    return True


def _is_tuple(text: str) -> bool:
    return "," in text and _TUPLE.fullmatch(text) is not None


def _listed_cases(text: str) -> str:
    """Return a system of equations as a list of them."""
    found = _CASES.fullmatch(text)
    rows = [] if found is None else [row.strip(" ,;") for row in found["rows"].split("\\\\") if row.strip()]
    return ", ".join(rows) if rows and all(row.count("=") == 1 for row in rows) else text


def _right_sides(gold: str, given: str) -> tuple[str, str]:
    """Return what two equations of one left side say of it, and a derivative's value beside one without its name."""
    named = [_DERIVATIVE.fullmatch(text) for text in (gold, given)]
    values = [text if name is None else name["value"].strip() for name, text in zip(named, (gold, given), strict=True)]
    if all(named) or (named[0] and "=" not in given) or (named[1] and "=" not in gold):
        one_name = not all(named) or len({_function_of(name) for name in named if name is not None}) == 1
        return (values[0], values[1]) if one_name else (gold, "")
    sides = [[re.sub(r"\s", "", side) for side in text.split("=")] for text in (gold, given)]
    one_left = sides[0][0] == sides[1][0] or all(_OPERATION.search(left) for left, *_ in sides)
    one_left = one_left and all(len(one) == 2 and re.search(r"[A-Za-z]", one[0]) for one in sides)
    if one_left and not re.search(r"[,;<>\\]\s*=|=\s*=|[,;]", gold + given):
        return gold.split("=")[1].strip(), given.split("=")[1].strip()
    return gold, given


def _function_of(derivative: re.Match[str]) -> str:
    return derivative["above"] or derivative["plain"] or derivative[0].strip()[0]


def _between(text: str) -> str:
    """Return a bounded distance as what it leaves: 1 < x < 5 of |x - 3| < 2."""
    found = _DISTANCE.fullmatch(text)
    if found is None:
        return text
    most, middle = _value(found["most"]), _value(found["from"] or "0") * (-1 if found["sign"] == "+" else 1)
    if most <= 0:
        return text
    low, high = (f"{end.numerator}/{end.denominator}".removesuffix("/1") for end in (middle - most, middle + most))
    return f"{low} {found['less']} {found['name']} {found['less']} {high}"


def _value(number: str) -> Fraction:
    numbers = re.findall(r"\d+(?:\.\d+)?", number)
    return Fraction(numbers[0]) if len(numbers) == 1 or not int(numbers[1]) else Fraction(numbers[0]) / int(numbers[1])


def _inward(text: str) -> str:
    """Return intervals with round brackets at open ends."""
    found = list(_OUTWARD.finditer(text))
    if not found or all(one["open"] + one["close"] == "[]" for one in found):
        return text
    return _OUTWARD.sub(
        lambda one: f"{'[' if one['open'] == '[' else '('}{one['parts']}{']' if one['close'] == ']' else ')'}", text
    )


def _is_interval(text: str) -> bool:
    text = _MEMBER.sub("", text)
    return bool(_INTERVALS.fullmatch(text)) and ("," in text) and not text.lstrip().startswith("\\{")


def _interval(text: str) -> str:
    """Return inequalities as intervals; a text of anything else as it is."""
    parts = []
    for part in _MEMBER.sub("", text, count=1).split(","):
        chain, side = _CHAIN.fullmatch(part), _ONE_SIDED.fullmatch(part)
        if chain is not None:
            left = "(" if _strict(chain["first"]) else "["
            right = ")" if _strict(chain["second"]) else "]"
            parts.append(f"{left}{chain['low']},{chain['high']}{right}")
        elif side is not None:
            less = side["sign"][0] in "<≤" or side["sign"].startswith("\\l")
            if less:
                parts.append(f"(-\\infty,{side['bound']}{')' if _strict(side['sign']) else ']'}")
            else:
                parts.append(f"{'(' if _strict(side['sign']) else '['}{side['bound']},\\infty)")
        else:
            return _MEMBER.sub("", text, count=1)
    return " \\cup ".join(parts)


def _strict(sign: str) -> bool:
    return sign in {"<", ">", "\\lt", "\\gt"}


def _tuple(text: str) -> str:
    """Return a vector as a tuple; anything else as it is."""
    angles = _ANGLES.fullmatch(text)
    if angles is not None:
        return f"({angles['parts']})"
    matrix = _MATRIX.fullmatch(text)
    if matrix is None:
        return text
    rows = [row.strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix["rows"]) if row.strip()]
    if len(rows) == 1:
        return "(" + ",".join(rows[0].split("&")) + ")"
    return "(" + ",".join(rows) + ")" if not any("&" in row for row in rows) else text
