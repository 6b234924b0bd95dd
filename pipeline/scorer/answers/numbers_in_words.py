"""Reads numbers that are spelled out in English, "minus twenty-five" and "three quarters" among them."""

import re
from fractions import Fraction
from typing import NamedTuple

__all__ = ["COUNTING", "SpelledNumber", "last_spelled_out", "spelled_out"]

_UNITS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
    "seventeen": 17, "eighteen": 18, "nineteen": 19,
}  # fmt: skip
_TENS = {
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip
_LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {
    "half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9,
    "tenth": 10, "eleventh": 11, "twelfth": 12, "sixteenth": 16, "twentieth": 20, "hundredth": 100,
    "thousandth": 1000, "millionth": 10**6, "halves": 2,
}  # fmt: skip
COUNTING = {*_UNITS, *_TENS, *_LARGE, "hundred"}
_BEFORE = re.compile(
    r"(?:.*\b(?:is|are|was|equals|gives|be|get|has|have|answer)\b\W*|\W*|.*:\W*)", re.IGNORECASE | re.DOTALL
)
_NOT = re.compile(
    r"\b(?:not|no|than|least|most|or|and|nor|either|of|squared|cubed|times|plus|minus|over|sure|certain|confident"
    r"|confidence|certainty"
    r"|convinced|\w+n't)\b",
    re.IGNORECASE,
)
_POINT_BEFORE = re.compile(r"(?<!\bthis )(?<!\bthat )(?<!\bthe )\bpoint\s+$", re.IGNORECASE)
_DECIMALS = re.compile(r"\s+point((?:[\s-]+(?:zero|one|two|three|four|five|six|seven|eight|nine))+)\b", re.IGNORECASE)
_AND_PART = re.compile(r"\s+and\s+(?:an?|one)[\s-]+(half|third|quarter|fourth|fifth|tenth)\b", re.IGNORECASE)
_MAX_WORDS_AFTER = 3


class SpelledNumber(NamedTuple):
    """A number in letters, and what stands before and behind it."""

    value: Fraction
    head: str
    tail: str


def spelled_out(text: str) -> Fraction | None:
    """Return the number that a text of letters says, None where it says none, or not one alone."""
    if re.fullmatch(r"\W*(?:an?\s+|one\s+)?half\W*", text, re.IGNORECASE):
        return Fraction(1, 2)
    words = _words(text)
    found = _spelled_from(text, words, next((i for i, word in enumerate(words) if _counts(word)), len(words)))
    if found is None:
        return None
    value, head, tail = found
    after = re.findall(r"[A-Za-z]+", tail)
    if not _BEFORE.fullmatch(head) or _NOT.search(head) or _NOT.search(tail) or len(after) > _MAX_WORDS_AFTER:
        return None
    if any(word.lower() in COUNTING for word in after) or re.search(r"[=+*/^<>\\\d]", tail + head):
        return None
    return value


def last_spelled_out(text: str) -> SpelledNumber | None:
    """Return the last number in letters; None without one, and where its words are several."""
    words = _words(text)
    first = next((i for i in range(len(words) - 1, -1, -1) if _counts(words[i])), len(words))
    while first and (
        _counts(words[first - 1])
        or (words[first - 1].group().lower() in {"and", "point"} and first > 1 and _counts(words[first - 2]))
    ):
        first -= 1
    return _spelled_from(text, words, first)


def _spelled_from(text: str, words: list[re.Match[str]], first: int) -> SpelledNumber | None:
    """Return the number whose first word is `words[first]`; None where the words are no number, or are all read."""
    if first == len(words):
        return None
    last = first
    while last + 1 < len(words) and (
        _counts(words[last + 1]) or (_is_and(words[last + 1]) and last + 2 < len(words) and _counts(words[last + 2]))
    ):
        last += 1
    value = _whole([word.group().lower() for word in words[first : last + 1] if not _is_and(word)])
    if value is None:
        return None
    result = Fraction(value)
    part = words[last + 1].group().lower() if last + 1 < len(words) else ""
    if part in _PARTS or part.removesuffix("s") in _PARTS:
        result /= _PARTS.get(part) or _PARTS[part.removesuffix("s")]
        last += 1
    head, tail = text[: words[first].start()], text[words[last].end() :]
    further = _further(tail)
    if further is None or _POINT_BEFORE.search(head):
        return None
    result, tail = result + further[0], tail[further[1] :]
    sign = re.search(r"\b(?:minus|negative)\W*$|(?<!\w)-\s*$", head, re.IGNORECASE)
    if sign is not None:
        head, result = head[: sign.start()], -result
    return SpelledNumber(result, head, tail)


def _further(tail: str) -> tuple[Fraction, int] | None:
    """Return what "point five" or "and a half" behind a whole number adds, and its length; None of another "point"."""
    decimals, part = _DECIMALS.match(tail), _AND_PART.match(tail)
    if decimals is not None:
        digits = "".join(str(_UNITS[digit.lower()]) for digit in re.findall(r"[A-Za-z]+", decimals[1]))
        return Fraction(int(digits), 10 ** len(digits)), decimals.end()
    if part is not None:
        return Fraction(1, _PARTS[part[1].lower()]), part.end()
    return None if re.match(r"\W+point\b", tail, re.IGNORECASE) else (Fraction(0), 0)


def _words(text: str) -> list[re.Match[str]]:
    return list(re.finditer(r"[A-Za-z]+(?:n't)?", text))


def _counts(word: re.Match[str]) -> bool:
    return word.group().lower() in COUNTING


def _is_and(word: re.Match[str]) -> bool:
    return word.group().lower() == "and"


def _whole(words: list[str]) -> int | None:
    """Return the value of counting words in their order, None where the order says no number."""
    total, group, before = 0, 0, 0
    for word in words:
        if word in _LARGE:
            if not group or (before and _LARGE[word] >= before):
                return None
            total, group, before = total + group * _LARGE[word], 0, _LARGE[word]
        elif word == "hundred":
            if not 0 < group < 100:
                return None
            group *= 100
        elif word in _TENS:
            if group % 100:
                return None
            group += _TENS[word]
        else:
            tens = group % 100
            if tens and (tens < 20 or tens % 10 or not 0 < _UNITS[word] < 10):
                return None
            group += _UNITS[word]
    return total + group
