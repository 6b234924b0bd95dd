"""Brings two answers into one notation: intervals and inequalities, vectors and tuples."""

import re

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


def same_notation(gold: str, given: str) -> tuple[str, str]:
    """Return both answers in one notation, if either is in another one that means the same."""
    gold, given = (_inward(_listed_cases(text)) for text in (gold, given))
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
