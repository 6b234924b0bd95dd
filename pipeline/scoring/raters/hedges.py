"""Says whether the words around a number leave open, bound, deny or take back what it says.

A sentence answers with a number only if it offers that one alone. Everything else is told apart here by what stands
before the number, behind it, and between it and the number before.
"""

# ruff: noqa: RUF001 - these characters are what is read

import re
from typing import Literal

from lachesis.pipeline.scoring.raters.latex import NARROW
from lachesis.pipeline.scoring.raters.number_words import COUNTING
from lachesis.pipeline.scoring.raters.numerals import Number

__all__ = ["Hedge", "hedge_around", "is_assurance", "joins", "rates_another"]

Hedge = Literal["bound", "wrong"]
"""bound: it is at most or at least that; an answer of a task that asks for the most or the least is put that way.
wrong: the sentence says that it is another number, or several."""

_FILL = (
    r"(?:\s+(?:it|that|is|was|be|it'?s|even|about|around|approximately|exactly|roughly|just|only|a|an|the|maybe"
    r"|perhaps|possibly|probably|might|could|may|would|else|also|then|simply))*"
)
_END = rf"[\s{NARROW}$€£¥₹(\[{{~\"']*$"
_COMPARED = r"(?:more|less|fewer|greater|larger|smaller|higher|lower|older|younger|longer|shorter|bigger)"
_NOUN = r"(?:\s*-?(?!(?:or|and|is|are|was|to)\b)[A-Za-z°%$€£][\w.]*){0,2}"
"""A unit, or a noun with its adjective, behind a number."""
_COUNTED = "(?:" + "|".join(sorted(COUNTING)) + ")"

_BOUND_BEFORE = re.compile(
    rf"(?:\bat (?:the )?(?:very )?(?:least|most)|\bup to|\bas (?:many|few|much|little) as|\b(?:no|not) {_COMPARED} than"
    rf"|\b(?:not exceed(?:ing)?|cannot exceed|upwards of|minimum of|maximum of|limited to|capped at)|(?:[≥≤]|>=|<=|=<"
    rf"|\\geq?|\\leq?)){_FILL}{_END}",
    re.IGNORECASE,
)
_BOUND_AFTER = re.compile(
    rf"^{_NOUN}\s*[,(]?\s*(?:(?:or|and) (?:{_COMPARED}|up|above|over|below|under|beyond)\b(?!\s+than)"
    r"|at (?:the )?(?:very )?(?:least|most)\b|(?:tops|minimum|maximum|max)\b)"
    r"|^\s*\+(?!\s*[\w(-])|^\s*plus\s*(?:$|[.,])",
    re.IGNORECASE,
)
_WRONG_BEFORE = re.compile(
    rf"(?:\bthan|\b(?:over|under|above|below|nearly|almost|between|exceed(?:s|ed|ing)?|beyond|within|in excess of"
    rf"|north of|south of|short of|close to|either|neither|nor|anything but|everything but|except(?: for)?|excluding"
    rf"|excludes|excluded?|without|far from|plus|times|multiplied by|divided by|modulo|mod|no longer|rules? out"
    rf"|ruling out|ruled out)|(?<!rather )\bor(?!\s+rather)|\b(?:sqrt|log|ln|sin|cos|tan|exp|sum of the digits of)"
    rf"(?:_?\{{?\d+\}}?)?|[<>]){_FILL}{_END}",
    re.IGNORECASE,
)
_WRONG_AFTER = re.compile(
    rf"^{_NOUN}\s*[,(]?\s*\b(?:and/or|or)\s+(?!so\b|thereabouts\b|not\b|(?:{_COMPARED}|up|above|over|below|under|beyond)\b)"
    rf"|^{_NOUN}\s+(?:is\s+)?{_COMPARED}\s+than\s+(?:\d|{_COUNTED}\b)"
    rf"|^{_NOUN}\s*,?\s*(?:and|to|plus|minus|times)\s+{_COUNTED}\b(?!\s+of\b)"
    r"|^\s*(?:itself\s+)?(?:(?:is|was|are|were|be|must be|would be|seems|looks)\s+"
    r"(?:\w+ly\s+|also\s+|still\s+|just\s+)?(?:not\b|wrong|incorrect|false|impossible|invalid|excluded|ruled out"
    r"|out of the question|too\s+\w+)"
    r"|(?:is|was|are|were|would|does|did|do|wo|could|ca|should)n['’]?t\b|cannot\b|can not\b"
    r"|(?:does|did|do|will|would|could|should) not\b|fails?\b)"
    r"|^\s*\?{1,3}\s*(?:no\b|not\b|nope)",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"\b(?:don['’]?t|do not|doesn['’]?t|does not|didn['’]?t|did not|never|can['’]?t|cannot|won['’]?t|wouldn['’]?t"
    r"|hardly)\s+"
    r"(?:\w+\s+)?(?:think|believe|say|claim|know|mean|see|find|expect|guess|suppose|have|get|reach|equal|make|give|be)\b"
    r"[^.,;:!?\n=]*$"
    r"|\b(?:doubt|doubtful|unlikely|improbable|whether|deny|denies)\b[^.,;:!?\n=]*$"
    r"|(?:\bnot|n['’]t) (?:the case|true|right|correct|sure|certain|likely|possible|clear)\b[^.,;:!?\n=]*$"
    r"|\b(?:is|it['’]?s|was) (?:false|wrong|incorrect|impossible|a mistake|an error|untrue)\s+(?:that|to)\b"
    r"[^.,;:!?\n=]*$"
    r"|\b(?:wrong|incorrect|mistaken|mistake|bad|false|naive) (?:answer|result|guess|value|number)\b[^.,;:!?\n]*$"
    r"|\b(?:suppose|supposing|assume|assuming|imagine|pretend|if)\b[^.,;:!?\n]*$",
    re.IGNORECASE,
)
"""What says, earlier in the sentence, that its number is not the one."""

_SURE = re.compile(
    r"^\s*(?:%|percent|per cent)?[\s-]*(?:\w+ly\s+)?(?:sure|certain|confident|convinced|certainty|confidence)\b"
    r"|^(?:\s*/\s*\d+|\s+out of\s+\d+)\s+(?:sure|certain|confident|confidence)\b",
    re.IGNORECASE,
)
_SURE_BEFORE = re.compile(
    r"\b(?:confidence|certainty|confident|sureness)(?:\s+(?:level|score|rating))?\s*(?:is|of|:|=|at|\(|-)*\s*(?:about\s*)?$",
    re.IGNORECASE,
)
_SURE_THAT = re.compile(
    r"(?:\b(?:I['’]?m|I am|am|that['’]?s|this is|it['’]?s|is|be)\s+(?:\w+\s+)?|\(\s*)$", re.IGNORECASE
)
_RIGHT = re.compile(r"^\s*(?:correct|right|positive|accurate)\b", re.IGNORECASE)
_CHANCE = re.compile(r"^\s*(?:probability|likelihood|chance)\b", re.IGNORECASE)

_UNITS = frozenset({
    "feet", "foot", "ft", "inch", "inches", "in", "yard", "yards", "mile", "miles", "hour", "hours", "h", "hr", "hrs",
    "minute", "minutes", "min", "second", "seconds", "sec", "s", "day", "days", "week", "weeks", "month", "months",
    "year", "years", "dollar", "dollars", "cent", "cents", "euro", "euros", "pound", "pounds", "lb", "lbs", "ounce",
    "ounces", "oz", "meter", "meters", "metre", "metres", "m", "cm", "mm", "km", "kg", "g", "gram", "grams", "degree",
    "degrees", "percent", "quarter", "quarters", "dime", "dimes",
})  # fmt: skip
_OR = re.compile(
    rf"^[^.!?\n;=]{{0,40}}?\b(?:and/or|or)\b(?!\s+(?:so|not|rather|{_COMPARED}|over|under|above|below|after)\b)"
    r"(?:\s+[^\s,]+){0,4}\s*[$€£(\"']*$|^[^.!?\n;]{0,20}\bor\s+[A-Za-z]\w{0,2}\s*=\s*$"
)
_NAMED = r"(?:\s*[A-Za-z](?:_?\{?\w\}?)?\s*[=:])?"
_LINK = re.compile(
    rf"^\s*(?P<noun>[A-Za-z°%][\w.]*)?\s*[)\]]?\s*"
    rf"(?:[,;&]|\.{{2,}}|…|~|-+|\\(?:ldots|dots|cdots)|,?\s*\b(?:and|then|nor|vs\.?|versus|till|until|through|thru|to)\b){{1,2}}"
    rf"{_FILL}{_NAMED}\s*[$€£¥(\[\"']*$",
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
    r"^(?:\s+[A-Za-z]+){0,2}\s*(?:\b(?:plus|minus|times|x|by|divided by|multiplied by|over|mod|modulo|less|per|choose"
    r"|to the power(?: of)?|to the)\b|[*×/^+÷])\s*[$€£(]*$",
    re.IGNORECASE,
)
_OTHER = re.compile(
    r"^[^=\n]{0,60}\b(?:another|the other|the second|alternatively|otherwise)\b[^=\n\d]{0,30}$", re.IGNORECASE
)
_AFTER_PREPOSITION = re.compile(
    r"\b(?:in|on|by|at|after|before|of|for|with|day|week|year|month|step|round|part|case|question|problem|hour|minute|page"
    r"|row|since|when|if|until|from|during|chapter|level|grade|age|number|no\.|since|because|given|as|where|let|every)"
    r"\s*(?:[\w+*/^()-]+\s*=?\s*){0,3}$",
    re.IGNORECASE,
)
_ROUNDED = re.compile(r"\bround(?:s|ed|ing)?(?: up| down)?(?: from)?\s*$", re.IGNORECASE)
_REACHES = re.compile(
    r"\b(?:add\w*|sum\w*|round\w*|goes|go|went|com\w+|came|ris\w+|rose|total\w*|it|them|this|that|price|number)\s+up\s+to\b",
    re.IGNORECASE,
)
_MAX_BETWEEN = 120
_NEAR = 40
_NEXT_LINE = re.compile(r"[ \t]*\n\s*[-*•]?\s*")
_MODAL = re.compile(r"\b(?:maybe|perhaps|possibly|might|may|could)\b", re.IGNORECASE)
_BARE_LINE = re.compile(r"(?:^|\n)[ \t]*(?:[-*•+]|\d+[.)])?[ \t]*$")


def hedge_around(head: str, tail: str) -> Hedge | None:
    """Return how the words before and behind a number, up to the ends of its sentence, change what it says."""
    head = _REACHES.sub(" is", head)
    if _BOUND_BEFORE.search(head) or _BOUND_AFTER.search(tail):
        return "bound"
    if _WRONG_BEFORE.search(head) or _WRONG_AFTER.search(tail) or _DENIED.search(head):
        return "wrong"
    return None


def is_assurance(number: Number | None, head: str, tail: str) -> bool:
    """Return whether a number says how sure somebody is: "I am 95 % sure"."""
    if _SURE.match(tail):
        return True
    return number is not None and number.percent and bool(_SURE_THAT.search(head) and _RIGHT.match(tail))


def rates_another(head: str, tail: str) -> bool:
    """Return whether a number, behind another one, says how likely that one is: "confidence: 95 %"."""
    return bool(_SURE_BEFORE.search(head) or (re.search(r"\bwith\s+(?:an?\s+)?$", head) and _CHANCE.match(tail)))


def joins(head: str, between: str, tail: str) -> bool:
    """Return whether two numbers in a row are one statement: a list, a range, alternatives, two parts of a quantity.

    `head` is what stands before the first one, `between` between the two, `tail` behind the second one.
    """
    if len(between) > _MAX_BETWEEN:
        return False
    if "\n" in between:
        return bool(_NEXT_LINE.fullmatch(between) and _BARE_LINE.search(head)) and _is_blank(tail)
    if not between.strip() or _is_alternative(head, between, tail):
        return True
    ranged = _TO.match(between)
    return _is_list(head, between, tail) if ranged is None else _is_range(head, ranged["noun"].lower(), tail)


def _is_alternative(head: str, between: str, tail: str) -> bool:
    if _OR.search(between) or _CALCULATED.search(between) or _OTHER.search(between):
        return True
    if _MODAL.search(between) and _MODAL.search(head[-_NEAR:]):
        return True
    return re.fullmatch(r"\?\s*", between) is not None and re.match(r"\s*\?", tail) is not None


def _is_range(head: str, noun: str, tail: str) -> bool:
    if re.search(r"\bby\s+[$€£]?$", head) or _ROUNDED.search(head):
        return False
    return not noun.isalpha() or noun in _UNITS or noun == _next_word(tail)


def _is_list(head: str, between: str, tail: str) -> bool:
    counted = _AND.match(between)
    if counted is not None:
        return not _VERBS.intersection(counted["words"].lower().split()) and not _VERB_AFTER.match(tail)
    unit = re.fullmatch(r"\s*([A-Za-z]+)\s*", between)
    if unit is not None and unit[1].lower() in _UNITS:
        return _next_word(tail) in _UNITS  # 5 feet 6 inches
    if re.fullmatch(r"\s*\(\s*", between):
        return True
    link = _LINK.match(between)
    if link is None:
        return False
    noun, following = (link["noun"] or "").lower(), _next_word(tail)
    if noun not in {"", "percent", following} and not (noun in _UNITS and following in _UNITS):
        return False
    return not (re.search(r"[,;]", between) and _AFTER_PREPOSITION.search(head))


def _next_word(tail: str) -> str:
    found = re.match(r"[\s-]*([A-Za-z]+|[%°])", tail)
    return found[1].lower() if found is not None else ""


def _is_blank(tail: str) -> bool:
    return not tail.split("\n", 1)[0].strip(" \t.*")
