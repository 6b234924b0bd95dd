"""Separates what a completion answers from what it thought before."""

import re

__all__ = ["OPENED_KEY", "answer_part", "last_match", "opened_thought"]

OPENED_KEY = "prompt_opens"
"""The key of a rollout group's metadata under which the tag stands that its prompts end with."""
_TAIL_CHARS = 64
_HINTS = ("think", "Think", "THINK", "hought", "HOUGHT", "easoning", "EASONING", "<|channel|>")
"""Parts of the tags, one of which a text has that has any."""

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
    """Return what follows the thinking: all where there was none, "" where it did not end.

    Tags of the usual model families are known. A prompt whose template opens the thinking leaves only the end of it.
    """
    if not any(hint in completion for hint in _HINTS):
        return completion
    start = 0
    for end in _END.finditer(completion):
        start = end.end()
    rest = completion[start:]
    return "" if _BEGIN.search(rest) is not None else rest


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match of a pattern, None without any."""
    last = None
    for found in pattern.finditer(text):
        last = found
    return last


def opened_thought(prompt: str) -> str:
    """Return the tag by which a prompt opens the thinking of what follows; "" where it does not."""
    tail = prompt[-_TAIL_CHARS:].rstrip()
    last = last_match(_BEGIN, tail)
    return last.group() if last is not None and last.end() == len(tail) else ""
