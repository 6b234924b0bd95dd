"""Separates what a completion answers from what it thought before."""

import re

__all__ = ["answer_part", "unfinished_thought"]

_END = re.compile(
    r"</(?:think|thinking|thought|reasoning)>|\[/THINK\]|<\|end_of_thought\|>|◁/think▷|</seed:think>"
    r"|<\|channel\|>\s*final\s*<\|message\|>",
    re.IGNORECASE,
)
_BEGIN = re.compile(
    r"<(?:think|thinking|thought|reasoning)>|\[THINK\]|<\|begin_of_thought\|>|◁think▷|<seed:think>"
    r"|<\|channel\|>\s*analysis\s*<\|message\|>",
    re.IGNORECASE,
)


def answer_part(completion: str) -> str:
    """Return what follows the thinking: all of it where there was none, "" where the thinking did not end.

    Tags of the usual model families are known. A prompt whose template opens the thinking leaves only the end of it.
    """
    start = 0
    for end in _END.finditer(completion):
        start = end.end()
    rest = completion[start:]
    opened = _BEGIN.match(rest.lstrip()) if start else _BEGIN.search(rest)
    return "" if opened is not None else rest


def unfinished_thought(completion: str) -> bool:
    """Return whether a completion began to think and was cut off before the end of it."""
    return bool(completion.strip()) and not answer_part(completion) and _BEGIN.search(completion) is not None
