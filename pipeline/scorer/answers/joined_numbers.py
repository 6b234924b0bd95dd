"""Checks whether two numbers in a row are one statement: alternatives, a list, a range.

A sentence answers with a number only if it offers that one alone.
"""

# ruff: noqa: RUF001 - these characters are what is read

import re

from lachesis.pipeline.scorer.answers.hedges import COMPARED, DOUBTFUL

__all__ = ["joins"]

_UNITS = frozenset({
    "feet", "foot", "ft", "inch", "inches", "in", "yard", "yards", "mile", "miles", "hour", "hours", "h", "hr", "hrs",
    "minute", "minutes", "min", "second", "seconds", "sec", "s", "day", "days", "week", "weeks", "month", "months",
    "year", "years", "dollar", "dollars", "cent", "cents", "euro", "euros", "pound", "pounds", "lb", "lbs", "ounce",
    "ounces", "oz", "meter", "meters", "metre", "metres", "m", "cm", "mm", "km", "kg", "g", "gram", "grams", "degree",
    "degrees", "percent", "quarter", "quarters", "dime", "dimes",
    "ish", "°", "'", '"',
})  # fmt: skip
_OR = re.compile(
    rf"^[^.!?\n;=]{{0,40}}?\b(?:and/or|or)\b(?!\s+(?:so|not|rather|{COMPARED}|over|under|above|below|after)\b)"
    r"(?:\s+[^\s,]+){0,4}\s*[$€£(\"']*$|^[^.!?\n;]{0,20}(?:\bor\b|∨|\\lor|\\vee)\s*(?:[A-Za-z]\w{0,2}\s*=\s*)?$"
)
_NAMED = r"(?:\s*[A-Za-z](?:_?\{?\w\}?)?\s*[=:])?"
_LINK = re.compile(
    rf"^\s*(?P<noun>[A-Za-z°%][\w.]*)?\s*[)\]]?\s*"
    rf"(?:[,;&]|\.{{2,}}|…|~|-+|\\(?:ldots|dots|cdots)|,?\s*\b(?:and|as well as|along with|together with|followed by"
    rf"|then|nor|vs\.?|versus|till|until|through|thru|to)\b){{1,2}}"
    rf"{DOUBTFUL}{_NAMED}\s*[$€£¥(\[\"']*$",
    re.IGNORECASE,
)
_AND = re.compile(
    rf"^(?P<words>(?:\s+[A-Za-z]+){{0,3}}),?\s+(?:and|&)(?:\s+(?:also|then|maybe|another))*{_NAMED}\s*[$€£(]*$",
    re.IGNORECASE,
)
_VERBS = frozenset({
    "is", "are", "was", "were", "has", "have", "had", "leaves", "left", "gives", "get", "gets", "remain", "remains",
    "makes", "equals", "came", "come", "comes", "go", "goes", "went",
})  # fmt: skip
_VERB_AFTER = re.compile(r"^(?:\s+\w+)?\s+(?:remain|remains|remained|stay|stayed|(?:are|were|is|was) left)\b")
_TO = re.compile(
    r"^\s*(?P<noun>[A-Za-z°%$€£]*)\s+(?:up\s+)?to\s+(?:about\s+|around\s+|roughly\s+|nearly\s+)?[$€£]?\s*$"
)
_CALCULATED = re.compile(
    r"^(?:\s+[A-Za-z]+){0,2},?\s*(?:\b(?:plus|minus|times|x|by|divided by|multiplied by|over|mod|modulo|less|per|choose"
    r"|remainder|R"
    r"|to the power(?: of)?|to the)\b|[*×/^+÷])\s*[$€£(]*$",
    re.IGNORECASE,
)
_OTHER = re.compile(
    r"^[^=\n]{0,60}\b(?:another|the other|the second|alternatively|otherwise"
    r"|(?:second|other|alternative) (?:answer|solution|option|possibility|value))\b[^=\n\d]{0,30}$",
    re.IGNORECASE,
)
_AFTER_PREPOSITION = re.compile(
    r"\b(?:in|on|by|at|after|before|of|for|with|day|week|year|month|step|round|part|case|question|problem|hour|minute|page"
    r"|row|since|when|if|until|from|during|chapter|level|grade|age|number|no\.|since|because|given|as|where|let|every)"
    r"\s*(?:[\w+*/^()<>≤≥-]+\s*=?\s*){0,3}$",
    re.IGNORECASE,
)
_ROUNDED = re.compile(r"\bround(?:s|ed|ing)?(?: up| down)?(?: from)?\s*$", re.IGNORECASE)
_LABEL = re.compile(r"(?:^|\n)[ \t]*([A-Za-z]\w*)\s*=\s*$")
_SAYS = re.compile(r"\b[A-Za-z]\w*\s*([:=]|\s(?:is|are|has|have|gets|got|was))\s*[$€£]?$")
_SAYS_TOO = re.compile(
    r"(?:\s+[A-Za-z]+)?\s*(?:[,;]|,?\s+(?:and|while|whereas|but))\s*(?:[A-Za-z]\w*\s*){1,2}?([:=]|\s(?:is|are|has|have|gets|got|was))"
    r"\s*[$€£]?"
)
"""Ann has 12, Bob has 18"""
_CAPITALISED_LABEL = re.compile(r"(?:^|[\s,;])(?!On|In|At|By|After|Of|For)[A-Z][a-z]+\s+[$€£]?$")
_NEXT_CAPITALISED_LABEL = re.compile(r"\s*[,;]\s*(?:and\s+)?[A-Z][a-z]+\s+[$€£]?")
"""Monday 3, Tuesday 5"""
_CONCLUSION = re.compile(r"\b(?:so|thus|hence|then|therefore|total|sum|together)\b", re.IGNORECASE)
_MAX_BETWEEN = 120
_NEAR = 40
_NEXT_LINE = re.compile(r"[ \t]*\n\s*[-*•]?\s*")
_MODAL = re.compile(r"\b(?:maybe|perhaps|possibly|might|may|could)\b", re.IGNORECASE)
_BARE_LINE = re.compile(r"(?:^|\n)[ \t]*(?:[-*•+]|\d+[.)])?[ \t]*$")


def joins(head: str, between: str, tail: str) -> bool:
    """Return whether two numbers in a row are one statement, so that neither is an answer.

    `head` is what stands before the first one, `between` between the two, `tail` behind the second one.
    """
    if len(between) > _MAX_BETWEEN:
        return False
    if "\n" in between:
        labels = _LABEL.search(head), _LABEL.search(between)
        if labels[0] is not None and labels[1] is not None and labels[0][1] == labels[1][1]:
            return _is_blank(between.split("\n", 1)[0])  # x = 12, and x = 18 in the next line
        return bool(_NEXT_LINE.fullmatch(between) and _BARE_LINE.search(head)) and _is_blank(tail)
    if not between.strip() or _is_alternative(head, between, tail):
        return True
    ranged = _TO.match(between)
    return _is_list(head, between, tail) if ranged is None else _is_range(head, ranged["noun"].lower(), tail)


def _is_alternative(head: str, between: str, tail: str) -> bool:
    if _OR.search(between) or _CALCULATED.search(between) or _OTHER.search(between):
        return True
    if _are_alike(head, between) or (_MODAL.search(between) and _MODAL.search(head[-_NEAR:])):
        return True
    return re.fullmatch(r"\?\s*", between) is not None and re.match(r"\s*\?", tail) is not None


def _are_alike(head: str, between: str) -> bool:
    """Return whether the same is said of two things: "Ann has 12, Bob has 18"."""
    first, second = _SAYS.search(head), _SAYS_TOO.fullmatch(between)
    if first is None or second is None or first[1] != second[1]:
        return bool(_CAPITALISED_LABEL.search(head) and _NEXT_CAPITALISED_LABEL.fullmatch(between))
    return not _AFTER_PREPOSITION.search(head[: first.start()] + " ") and not _CONCLUSION.search(between)


def _is_range(head: str, noun: str, tail: str) -> bool:
    if re.search(r"\bby\s+[$€£]?$", head) or _ROUNDED.search(head):
        return False
    return not noun.isalpha() or noun in _UNITS or noun == _next_word(tail)


def _is_list(head: str, between: str, tail: str) -> bool:
    counted = _AND.match(between)
    if counted is not None:
        return not _VERBS.intersection(counted["words"].lower().split()) and not _VERB_AFTER.match(tail)
    following, unit, link = _next_word(tail), between.strip().lower(), _LINK.match(between)
    if unit in _UNITS:
        return following in _UNITS  # 5 feet 6 inches
    if link is None:
        return unit == "("
    noun = (link["noun"] or "").lower()
    if noun not in {"", "percent", following} and not (noun in _UNITS and following in _UNITS):
        return False
    if re.search(r"[(\[{]\s*[$€£-]?$", head):
        return True
    return not (re.search(r"[,;]", between) and _AFTER_PREPOSITION.search(head))


def _next_word(tail: str) -> str:
    found = re.match(r"[\s-]*([A-Za-z]+|[%°'\"])", tail)
    return found[1].lower() if found is not None else ""


def _is_blank(tail: str) -> bool:
    return not tail.split("\n", 1)[0].strip(" \t.*")
