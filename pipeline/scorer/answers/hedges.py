"""Checks whether the words around a number leave it open, bound it, deny it or take it back.

A sentence answers with a number only if it states it. This finds "at most 18", "not 18" and "I am 18 % sure" by the
words before and behind the number, up to the ends of the sentence.
"""

# ruff: noqa: RUF001 - these characters are what is read

import re
from typing import Literal

from lachesis.pipeline.scorer.answers.latex import NARROW
from lachesis.pipeline.scorer.answers.numbers_in_digits import Number
from lachesis.pipeline.scorer.answers.numbers_in_words import COUNTING

__all__ = ["COMPARED", "DOUBTFUL", "Hedge", "hedge_around", "is_assurance", "rates_another"]

Hedge = Literal["bound", "wrong"]
"""bound: it is at most or at least that; an answer of a task that asks for the most or the least is put that way.
wrong: the sentence says that it is another number, or several."""

_FILL = (
    r"(?:\s+(?:it|that|is|was|be|it'?s|even|about|around|approximately|exactly|roughly|just|only|a|an|the|maybe"
    r"|perhaps|possibly|probably|might|could|may|would|else|also|then|simply))*"
)
DOUBTFUL = r"(?:\s+(?:even|about|around|approximately|roughly|maybe|perhaps|possibly|probably|also|then))*"
_END = rf"[\s{NARROW}$€£¥₹(\[{{~\"']*$"
COMPARED = r"(?:more|less|fewer|greater|larger|smaller|higher|lower|older|younger|longer|shorter|bigger)"
_NOUN = r"(?:\s*-?(?!(?:or|and|is|are|was|to)\b)[A-Za-z°%$€£][\w.]*){0,2}"
"""A unit, or a noun with its adjective, behind a number."""
_COUNTED = "(?:" + "|".join(sorted(COUNTING)) + ")"

_BOUND_BEFORE = re.compile(
    rf"(?:\bat (?:the )?(?:very )?(?:least|most)|\bup to|\bas (?:many|few|much|little) as|\b(?:no|not) {COMPARED} than"
    rf"|\b{COMPARED} than or equal to"
    rf"|\b(?:not exceed(?:ing)?|cannot exceed|upwards of|minimum of|maximum of|limited to|capped at)|(?:[≥≤]|>=|<=|=<"
    rf"|\\geq?|\\leq?)){_FILL}{_END}|\b(?:minimum|maximum|max)\s+[$€£]?$",
    re.IGNORECASE,
)
_BOUND_AFTER = re.compile(
    rf"^{_NOUN}\s*[,(]?\s*(?:(?:or|and|&) (?:{COMPARED}|up|above|over|below|under|beyond|counting)"
    rf"\b(?!\s+than)|(?:maybe|perhaps|possibly|probably) (?:even )?{COMPARED}\b"
    r"|at (?:the )?(?:very )?(?:least|most)\b|(?:tops|minimum|maximum|max)\b)"
    r"|^\s*\+(?!\s*[\w(-])|^\s*plus\s*(?:$|[.,])",
    re.IGNORECASE,
)
_WRONG_BEFORE = re.compile(
    rf"(?:\bthan|\b(?:over|under|above|below|nearly|almost|between|exceed(?:s|ed|ing)?|beyond|within|in excess of"
    rf"|north of|south of|short of|close to|either|neither|nor|anything but|everything but|except(?: for)?|excluding"
    rf"|excludes|excluded?|without|far from|plus|times|multiplied by|divided by|modulo|mod"
    rf"|(?:one|1|once) in(?: every)?|no longer"
    rf"|rul(?:e|es|ing|ed) out|reject(?:s|ed|ing)?|discard(?:s|ed|ing)?|eliminat(?:e|es|ed|ing)|hardly|barely"
    rf"|(?:option|answer|solution|possibility) ?#?[2-9][:=])|(?<!rather )\bor(?!\s+rather)"
    rf"|\b(?:sqrt|log|ln|sin|cos|tan|exp|sum of the digits of)"
    rf"(?:_?\{{?\d+\}}?)?|[<>]){_FILL}{_END}",
    re.IGNORECASE,
)
_WRONG_AFTER = re.compile(
    rf"^{_NOUN}\s*[,(]?\s*\b(?:and/or|or)\s+(?!so\b|thereabouts\b|not\b|(?:{COMPARED}|up|above|over|below|under|beyond)\b)"
    rf"|^{_NOUN}\s+(?:is\s+)?{COMPARED}\s+than\s+(?:\d|{_COUNTED}\b)"
    rf"|^{_NOUN}\s*,?\s*(?:and|to|plus|minus|times)\s+{_COUNTED}\b(?!\s+of\b)"
    r"|^\s*(?:itself\s+)?(?:(?:is|was|are|were|be|must be|would be|seems|looks)\s+"
    r"(?:\w+ly\s+|also\s+|still\s+|just\s+)?(?:not\b|wrong|incorrect|false|impossible|invalid|excluded|ruled out"
    r"|out of the question|too\s+\w+)"
    r"|(?:is|was|are|were|would|does|did|do|wo|could|ca|should)n['’]?t\b|cannot\b|can not\b"
    r"|(?:does|did|do|will|would|could|should) not\b|fails?\b)"
    r"|^\s*(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]*\.?,?\s+\d{4}\b"
    r"|^\s*(?:is|was|are|were) (?:rejected|discarded|eliminated|extraneous)\b"
    r"|^\s*\?{1,3}\s*(?:no\b|not\b|nope)|^\s*[,;]\s*no\s*(?:$|[.!,])",
    re.IGNORECASE,
)
_DENIED_BEFORE = re.compile(
    r"\b(?:don['’]?t|do not|doesn['’]?t|does not|didn['’]?t|did not|never|can['’]?t|cannot|won['’]?t|wouldn['’]?t"
    r"|hardly)\s+"
    r"(?:\w+\s+)?(?:think|believe|say|claim|know|mean|see|find|expect|guess|suppose|have|get|reach|equal|make|give|be)\b"
    r"(?:(?!\bbut\b)[^.,;:!?\n=])*$"
    r"|\b(?:doubt|doubtful|unlikely|improbable|whether|deny|denies)\b(?:(?!\bbut\b)[^.,;:!?\n=])*$"
    r"|(?:\bnot|n['’]t) (?:the case|true|right|correct|sure|certain|likely|possible|clear)\b"
    r"(?:(?!\bbut\b)[^.,;:!?\n=])*$"
    r"|\b(?:is|it['’]?s|was) (?:false|wrong|incorrect|impossible|a mistake|an error|untrue)\s+(?:that|to)\b"
    r"(?:(?!\bbut\b)[^.,;:!?\n=])*$"
    r"|\b(?:wrong|incorrect|mistaken|mistake|bad|false|naive) (?:answer|result|guess|value|number)\b"
    r"[^.,;:!?\n]*$"
    r"|\b(?:mistake|error|trap|misconception)\s+(?:is|was|would be|to)\b[^.,;:!?\n]*$"
    r"|\b(?:suppose|supposing|assume|assuming|imagine|pretend|if)\b[^.,;:!?\n]*$",
    re.IGNORECASE,
)
"""What says, earlier in the sentence, that its number is not the one."""

_SURE = re.compile(
    r"^\s*(?:chance|probability|likelihood)\b[^.\n\d]{0,40}\b(?:right|correct|wrong|true)\b"
    r"|^[ \t]*(?:%|percent|per cent)?[ \t-]*(?:\w+ly\s+)?(?:sure|certain|confident|convinced|certainty|confidence)\b"
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
_REACHES = re.compile(
    r"\b(?:add\w*|sum\w*|round\w*|goes|go|went|com\w+|came|ris\w+|rose|total\w*|it|them|this|that|price|number)\s+up\s+to\b",
    re.IGNORECASE,
)


def hedge_around(head: str, tail: str) -> Hedge | None:
    """Return how the words around a number, up to the ends of its sentence, change what it says."""
    head = _REACHES.sub(" is", head)
    if _BOUND_BEFORE.search(head) or _BOUND_AFTER.search(tail):
        return "bound"
    if _WRONG_BEFORE.search(head) or _WRONG_AFTER.search(tail) or _DENIED_BEFORE.search(head):
        return "wrong"
    return None


def is_assurance(number: Number | None, head: str, tail: str) -> bool:
    """Return whether a number states certainty: "I am 95 % sure"."""
    if _SURE.match(tail) or _SURE_BEFORE.search(head):
        return True
    return number is not None and number.percent and bool(_SURE_THAT.search(head) and _RIGHT.match(tail))


def rates_another(head: str, tail: str) -> bool:
    """Return whether a number, behind another one, says how likely that one is: "with 95 % probability"."""
    return bool(re.search(r"\bwith\s+(?:an?\s+)?$", head) and _CHANCE.match(tail))
