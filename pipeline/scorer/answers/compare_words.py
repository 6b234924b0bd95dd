"""Compares answers that are words: the letter of a choice, "yes", a name, "no solution"."""

# ruff: noqa: RUF001 - these characters are what is read

import re

from lachesis.pipeline.scorer.answers.latex import plain

__all__ = ["are_all_reals", "same_choice", "same_time", "same_words"]

_CHOICES = re.compile(r"[(\[]?\s*[A-Z]\s*[)\]]?[.:]?")
_LETTERS = re.compile(r"[A-H]{2,8}")
_CHOICE_SAID = re.compile(r"\(?(?P<letter>[A-H])[).:]\s*(?P<said>\S.*)", re.DOTALL)
"""A choice with what it says: A. Paris"""
_ALL_REALS = re.compile(
    r"\s*(?:(?:[a-z]\s*)?\\in\s*)?(?:\\mathbb\s*\{?\s*R\s*\}?|\\Re(?![A-Za-z])|ℝ|\(\s*-\s*\\infty\s*,\s*\+?\\infty\s*\))\s*"
)
_ALL_REALS_SAID = frozenset(
    {"all real numbers", "all reals", "real numbers", "reals", "set of all real numbers", "any real number"}
)
_SEVERAL = re.compile(r"[(\[{\s]*[A-Z](?:[\s,;/&)(]+(?:and\s+)?[A-Z])+[)\]}\s]*")
_LABELLED = re.compile(
    r"(?:the\s+)?(?:correct\s+|final\s+|best\s+|right\s+)?(?:answer|option|choice)?(?:\s+(?:answer|option|choice))?"
    r"(?:\s*(?:is|=|:))*\s*(?:option\s+|choice\s+)?(?P<open>[(\[]?)\s*(?P<letter>[A-Za-z])\s*(?P<close>[)\]]?)"
    r"(?P<rest>(?:\s*[.:)\-]\s*.*|\s+\S.*)?)",
    re.IGNORECASE | re.DOTALL,
)
_MORE = re.compile(r"\s*(?:and|or|nor|,|/|&|but|not|is (?:wrong|not|incorrect))\b|[,/&]|.*\([A-Z]\)", re.IGNORECASE)
_PREAMBLE = re.compile(
    r"(?:.*\b)?(?:answer|result|it|choice|option|name|word|day|colou?r|this|that|there)\s*(?:is|are|was|=|:)\s*(?:that\s+)?",
    re.IGNORECASE | re.DOTALL,
)
_ARTICLES = frozenset({"a", "an", "the"})
_NOTHING = frozenset({
    "no solution", "no solutions", "none", "no real solution", "no real solutions", "empty set", "does not exist",
    "dne", "no such number", "undefined", "nonexistent",
})  # fmt: skip
_EMPTY = re.compile(r"\s*(?:\\emptyset|\\varnothing|∅|\\\{\s*\\\}|\{\s*\})\s*")
_INFINITE = re.compile(
    r"(?P<sign>[-+]|(?:minus|negative|plus|positive)\s)?\s*(?:\\infty|∞|infinity|infinite|inf)\s*", re.IGNORECASE
)
_TIME = re.compile(
    r"(?P<hours>\d{1,2})(?::(?P<minutes>\d{2}))?\s*(?:(?P<half>[ap])\.?\s?m\b\.?)?(?:\s*o'clock)?", re.IGNORECASE
)
_HALF_DAY = 720
"""Minutes."""
_WORDS = re.compile(r"[A-Za-zÀ-ɏͰ-ϿЀ-ӿ぀-ヿ㐀-鿿가-힯]+(?:['’-][A-Za-z]+)*")
_SHORT = frozenset({"no", "up", "on", "in", "he", "we", "ok", "it", "us"})
_MATH_WORDS = frozenset({"sin", "cos", "tan", "log", "ln", "exp", "lim", "max", "min", "mod", "gcd", "lcm", "det",
    "cot",
    "sec", "csc", "arcsin", "arccos", "arctan", "pi", "sqrt", "frac", "infty", "cdot", "times"})  # fmt: skip


def same_words(gold: str, given: str) -> bool | None:
    """Return whether two answers say the same in words; None where the reference is not words."""
    expected, shown = plain(gold), plain(given)
    infinite = _INFINITE.fullmatch(expected), _INFINITE.fullmatch(shown)
    if infinite[0] is not None and infinite[1] is not None:
        return _is_negative(infinite[0]) == _is_negative(infinite[1])
    if "\\" in expected and not _EMPTY.fullmatch(gold):
        return None
    if _CHOICES.fullmatch(expected):
        return _letter(shown) == re.sub(r"[^A-Z]", "", expected)
    if _SEVERAL.fullmatch(expected):
        return bool(_SEVERAL.fullmatch(shown)) and _letters(expected) == _letters(shown)
    if _EMPTY.fullmatch(gold) or _key(expected) in _NOTHING:
        return bool(_EMPTY.fullmatch(given)) or _key(_said(shown)) in _NOTHING
    return _key(expected) in {_key(shown), _key(_said(shown))} if _is_words(expected, gold) else None


def same_choice(gold: str, given: str) -> bool | None:
    """Return whether two answers are the same choices, None where neither is one.

    One may have what its choice says, "A. Paris", or no commas, "AC".
    """
    expected, shown = plain(gold), plain(given)
    choices = _CHOICE_SAID.fullmatch(expected), _CHOICE_SAID.fullmatch(shown)
    if choices[0] is not None and _CHOICES.fullmatch(shown):
        return choices[0]["letter"] == re.sub(r"[^A-Z]", "", shown)
    if choices[0] is not None and choices[1] is not None:
        return choices[0]["letter"] == choices[1]["letter"] and _key(choices[0]["said"]) == _key(choices[1]["said"])
    pairs = ((expected, shown), (shown, expected))
    if any(_LETTERS.fullmatch(one) and _SEVERAL.fullmatch(two) for one, two in pairs):
        return _letters(expected) == _letters(shown)
    return None


def are_all_reals(gold: str, given: str) -> bool | None:
    """Return True where the reference is the set of real numbers, and the answer its words; else None."""
    return True if _ALL_REALS.fullmatch(gold) and _key(_said(plain(given))) in _ALL_REALS_SAID else None


def _is_negative(found: re.Match[str]) -> bool:
    return (found["sign"] or "").strip().lower() in {"-", "minus", "negative"}


def same_time(gold: str, given: str) -> bool | None:
    """Return whether two times of day are the same; None where that is not what the two are.

    A reference without a half of the day may be in either.
    """
    expected, shown = _TIME.fullmatch(plain(gold)), _TIME.fullmatch(plain(given))
    if expected is None or shown is None or not (expected["minutes"] or expected["half"]):
        return None
    if not expected["half"] and not shown["half"]:
        return True if plain(gold) == plain(given) else None
    minutes = _minutes(expected), _minutes(shown)
    if minutes[0] == minutes[1]:
        return True
    return not expected["half"] and int(expected["hours"]) <= 12 and minutes[0] % _HALF_DAY == minutes[1] % _HALF_DAY


def _minutes(found: re.Match[str]) -> int:
    hours, half = int(found["hours"]), (found["half"] or "").lower()
    return 60 * (hours % 12 + 12 * (half == "p") if half else hours) + int(found["minutes"] or 0)


def _letter(text: str) -> str | None:
    found = _LABELLED.fullmatch(text.strip().replace("*", ""))
    if found is None or _MORE.match(found["rest"]):
        return None
    rest = found["rest"].strip()
    if rest and not (found["close"] or rest[0] in ".:)-"):
        return None
    if found["letter"].islower() and rest and not found["close"]:
        return None
    return found["letter"].upper()


def _letters(text: str) -> list[str]:
    return sorted(re.findall(r"[A-Z]", text))


def _is_words(expected: str, gold: str) -> bool:
    if re.search(r"[\d=+*/^_<>\\{}|]", expected):
        return False
    words = _WORDS.findall(expected)
    if not words or any(word.lower() in _MATH_WORDS for word in words):
        return False
    longest = max(map(len, words))
    return longest > 2 or r"\text" in gold or expected.strip().lower() in _SHORT or not expected.isascii()


def _key(text: str) -> str:
    """Return the words, in one case and without articles."""
    return " ".join(word for word in map(str.casefold, _WORDS.findall(text)) if word not in _ARTICLES)


def _said(text: str) -> str:
    """Return the words without what introduces them."""
    found = _PREAMBLE.match(text)
    return text if found is None else text[found.end() :]
