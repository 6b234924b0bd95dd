"""The final answer of a piece of mathematics: what the last `\\boxed{...}` holds."""

import re

from lachesis.pipeline.scoring.raters.answer import last_match
from lachesis.pipeline.tasks.thoughts import answer_part

__all__ = ["boxed", "has_box"]

_MAX_ANSWER_CHARS = 512
_MAX_DEPTH = 64
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])[ \t]*\n?[ \t]*")
_BARE = re.compile(r"(?:[-+]?\d[\d.,]*\d|[-+]?\w)(?!\w)")


def has_box(text: str) -> bool:
    """Return whether a box was begun in the part of `text` that answers, readable or not."""
    return _BOX.search(answer_part(text)) is not None


def boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{}` or `\fbox{}` after the thinking holds; a box in a box is one box.

    `\boxed 7` holds 7. None where there is none, where its braces do not balance, and beyond 512 characters or 64
    levels of braces.
    """
    text = answer_part(text)
    last = last_match(_BOX, text)
    if last is None:
        return None
    if text[last.end() : last.end() + 1] != "{":
        bare = _BARE.match(text, last.end()) if last.group()[-1].isspace() else None
        return None if bare is None else bare.group()
    return _braced(text, last.end())


def _braced(text: str, brace: int) -> str | None:
    depth, i = 0, brace
    while i < min(len(text), brace + _MAX_ANSWER_CHARS + 2):
        match text[i]:
            case "\\":
                i += 1  # an escaped brace is text
            case "{":
                depth += 1
            case "}":
                depth -= 1
        if depth > _MAX_DEPTH:
            return None
        i += 1
        if not depth:
            return text[brace + 1 : i - 1].strip()
    return None
