"""Finds the final answer of a piece of mathematics: the content of the last `\\boxed{...}`."""

import re
from collections import deque

from lachesis.pipeline.tasks.thoughts import answer_part

__all__ = ["boxed", "has_box"]

_MAX_ANSWER_CHARS = 512
_MAX_DEPTH = 64
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])[ \t]*\n?[ \t]*")
_MAX_JOINED = 8
_MAX_JOINT_CHARS = 60
_JOINT = re.compile(
    r"[\s$*\\()\[\].]*(?:[,;&]|\b(?:and/or|and|or|alternatively)\b|"
    r"\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\})"
    r"[\s$*\\()\[\],]*(?:[A-Za-z](?:_\{?\w\}?)?\s*=\s*)?[\s$\\(\[]*",
    re.IGNORECASE,
)
"""What stands between two boxes of one answer."""
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|rather than|instead of|(?:less|more|greater|fewer|other) than)|n['\u2019]t)"
    r"(?: be| equal(?: to)?)?"
    r"[\s$*\\()\[\]]*\Z",
    re.IGNORECASE,
)
"""What says of a box that it does not hold the answer."""
_BARE = re.compile(r"(?:[-+]?\d[\d.,]*\d|[-+]?\w)(?!\w)")


def has_box(text: str) -> bool:
    """Return whether a box was begun in the part of `text` that answers, readable or not."""
    return _BOX.search(answer_part(text)) is not None


def boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{}` or `\fbox{}` after the thinking holds; a box in a box is one box.

    `\boxed 7` holds 7, and `\boxed{6} or \boxed{7}` holds "6, 7": boxes that are joined are one answer. None without
    one, where it is denied ("not \boxed{7}"), where its braces do not balance, and beyond 512 characters or 64 levels.
    """
    text = answer_part(text)
    boxes = deque(_BOX.finditer(text), _MAX_JOINED)
    if not boxes:
        return None
    last = boxes.pop()
    if _DENIED_BEFORE.search(text, max(0, last.start() - _MAX_JOINT_CHARS), last.start()):
        return None
    if text[last.end() : last.end() + 1] != "{":
        bare = _BARE.match(text, last.end()) if last.group()[-1].isspace() else None
        return None if bare is None else bare.group()
    held = _braced(text, last.end())
    if held is None:
        return None
    parts, start = [held.strip()], last.start()
    while boxes:
        before = boxes.pop()
        held = _braced(text, before.end())
        end = -1 if held is None else before.end() + len(held) + 2
        if (
            held is None
            or not before.end() < end <= start
            or not _JOINT.fullmatch(text[end:start][: _MAX_JOINT_CHARS + 1])
        ):
            break
        parts, start = [held.strip(), *parts], before.start()
    return parts[0] if len(set(parts)) == 1 else ", ".join(parts)


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
            return text[brace + 1 : i - 1]
    return None
