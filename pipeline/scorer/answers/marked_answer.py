"""Finds the answer that a completion marks: \\boxed{}, <answer>, "#### ", "the answer is", **bold**."""

# ruff: noqa: RUF001 - these characters are what is read

import re
from typing import NamedTuple

from lachesis.pipeline.scorer.answers.given_and_reference import last_match
from lachesis.pipeline.scorer.answers.last_box import boxed, has_box
from lachesis.pipeline.tasks.thoughts import answer_part

__all__ = ["MarkedAnswer", "marked_answer"]

_MAX_ANSWER_CHARS = 512
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).){0,2048}?)</answer>", re.DOTALL | re.IGNORECASE)
_TAG_BEFORE = re.compile(r"</answer>[\s.]*(?:[,;&]|\b(?:and/or|and|or|alternatively)\b)[\s,:]*\Z", re.IGNORECASE)
"""Answers that are alternatives: <answer>17</answer> or <answer>18</answer>."""
_HASHES = re.compile(r"^[ \t>*]*#{4}[ \t]*(\S[^\n]*)$", re.MULTILINE)
_SAID = re.compile(
    r"\b(?:final\s+)?(?:answer|result)\b\**\s*(?:(?:is|are|was)(?!n['’]t)|=|:|equals|(?:to|will|would|should|must)\s+be|"
    r"(?:works|comes|turns)\s+out\s+(?:to\s+be|as|to)|comes\s+to|：)+"
    r"\s*\**\s*(?:that\s+)?"
    r"|\banswer\s*:\s*|答案(?:是|为|：|:)\s*",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"\n|(?<=[^\d\s])(?<!\bi\.e)(?<!\be\.g)[.!?](?:\s|$)|(?<=\d)[.!?](?:\s|$)|。")
_BOLD = re.compile(
    r"(?<![*\w])\*\*(?!\s)([^*\n]{1,200}?)(?<!\s)\*\*(?![*\w])|(?<![_\w])__(?!\s)([^_\n]{1,200}?)__(?![_\w])"
)
_VALUE = re.compile(r"(?:[^\d\n]*(?:[=:≈~：]|\b(?:is|are))\s*)?[^\w\n]*(?:US)?[^\w\n]*(?:\d|\\[dt]?frac)")
"""What is bold and a number, or says that something is one: "Step 2" is a heading."""


class MarkedAnswer(NamedTuple):
    """The text of an answer. `sure`: nothing but the answer is marked that way, so what cannot be read is no answer."""

    text: str
    sure: bool
    rest: str = ""
    """What follows it."""
    before: str = ""
    """What stands before it, if it may change what it says: "I doubt that the answer is"."""


def marked_answer(completion: str) -> MarkedAnswer | None:
    """Return the answer that is marked: the last of the strongest mark; None without any."""
    text = answer_part(completion)
    if has_box(text):
        return MarkedAnswer(boxed(text) or "", True)
    for pattern in (_TAGGED, _HASHES):
        found = last_match(pattern, text)
        if found is not None:
            several = _TAG_BEFORE.search(text[: found.start()])
            return MarkedAnswer("" if several else found[1].strip()[:_MAX_ANSWER_CHARS], True)
    said = last_match(_SAID, text)
    if said is not None:
        rest = text[said.end() :].lstrip()[:_MAX_ANSWER_CHARS]
        end = _SENTENCE.search(rest)
        sentence = rest if end is None else rest[: end.start()]
        if sentence.strip("*_ "):
            return MarkedAnswer(sentence.strip(), False, rest[len(sentence) :], text[: said.end()])
    bold = None
    for found in _BOLD.finditer(text):
        if _VALUE.match(found[1] or found[2]):
            bold = found
    if bold is None:
        return None
    return MarkedAnswer((bold[1] or bold[2]).strip(), False, text[bold.end() :], text[: bold.start()])
