"""Finds what a model only thought, by `<think>...</think>` and the like, and its answer after that.

A chat template may open the thought in the prompt, so an answer may hold the closing marker alone: then everything
before it is thought. A thought that is not closed goes on to the end.
"""

import re
from collections.abc import Sequence

__all__ = ["OPENED_KEY", "PROMPT_END_TOKENS", "answer_part", "opened_thought", "thought_spans"]

OPENED_KEY = "prompt_opens"
"""The key of a rollout group's metadata under which the marker stands that its prompts end with."""
PROMPT_END_TOKENS = 24
"""Tokens at the end of a prompt in which a template opens a thought, a character each at worst."""
_TAIL_CHARS = 64
_MARKERS = (
    *((rf"<{tag}>", rf"</{tag}>") for tag in ("think", "thinking", "thought", "thoughts", "reasoning")),
    *((rf"<{tag}>", rf"</{tag}>") for tag in ("scratchpad", "seed:think", "mm:think", "longcat_think", "antthinking")),
    (r"\[THINK\]", r"\[/THINK\]"),
    (r"◁think▷", r"◁/think▷"),
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    (r"<\|think_start\|>", r"<\|think_end\|>"),
    (r"<\|think(?:ing)?\|>", r"<\|/think(?:ing)?\|>"),
    (r"<unused94>", r"<unused95>"),
    (r"<\|channel>thought\b", r"<channel\|>"),
    (r"<\|channel\|>\s*analysis\b(?:\s*<\|message\|>)?", r"<\|(?:end|return|call|start)\|>|(?=<\|channel\|>)"),
)
"""Opening and closing marker of each kind, as patterns. The last kind is closed by markers that close answers, too."""
_HINTS = ("think", "thought", "reasoning", "scratchpad", "<unused9", "channel")
"""Parts of the markers, in lower case: a text with none of them has no marker."""
_FIRST = r"(?=[<\[◁])"  # found faster than the alternatives are tried
_OPENERS = re.compile(_FIRST + "(?:" + "|".join(f"({opener})" for opener, _ in _MARKERS) + ")", re.IGNORECASE)
_CLOSERS = [re.compile(closer, re.IGNORECASE) for _, closer in _MARKERS]
_LONE_CLOSERS = re.compile(_FIRST + "(?:" + "|".join(closer for _, closer in _MARKERS[:-1]) + ")", re.IGNORECASE)
"""Those that may close what the prompt opened."""
_BEFORE_ANSWER = re.compile(rf"{_LONE_CLOSERS.pattern}|<\|channel\|>\s*final\s*<\|message\|>", re.IGNORECASE)
_AT_END = re.compile(rf"(?:{_OPENERS.pattern})\s*\Z", re.IGNORECASE)


def answer_part(completion: str) -> str:
    """Return what follows the last thought: all where there was none, "" where it did not end."""
    lower = completion.lower()
    if not any(hint in lower for hint in _HINTS):
        return completion
    start = 0
    for end in _BEFORE_ANSWER.finditer(completion):
        start = end.end()
    return "" if _OPENERS.search(completion, start) is not None else completion[start:]


def opened_thought(prompt: str) -> str:
    """Return the marker by which a prompt, or its end, opens a thought; "" if it opens none.

    The answer then begins in that thought.
    """
    found = _AT_END.search(prompt[-_TAIL_CHARS:])
    return "" if found is None else found.group().rstrip()


def thought_spans(text: str, skip: Sequence[tuple[int, int]] = (), *, opened: bool = False) -> list[tuple[int, int]]:
    """Return the parts of an answer that are thought, as (start, end) in order, markers included.

    `skip`: parts in which a marker is content, if they are not thought: texts that a call passes on. `opened`: the
    prompt ends in an open thought.
    """
    spans: list[tuple[int, int]] = []
    place = 0
    if opened or _closes_first(text, skip):
        closed = _outside(_LONE_CLOSERS, text, 0, skip)
        place = len(text) if closed is None else closed.end()
        spans.append((0, place))
    while (found := _outside(_OPENERS, text, place, skip)) is not None:
        closed = _CLOSERS[(found.lastindex or 1) - 1].search(text, found.end())
        end = len(text) if closed is None else closed.end()
        spans.append((found.start(), end))
        if closed is None:
            break
        place = end
    return spans


def _closes_first(text: str, skip: Sequence[tuple[int, int]]) -> bool:
    """Return whether a closing marker stands before any opening one."""
    closer = _outside(_LONE_CLOSERS, text, 0, skip)
    if closer is None:
        return False
    opener = _outside(_OPENERS, text, 0, skip)
    return opener is None or opener.start() > closer.start()


def _outside(pattern: re.Pattern[str], text: str, place: int, skip: Sequence[tuple[int, int]]) -> re.Match[str] | None:
    """Return the first match from `place` on that does not begin in one of `skip`."""
    for start, end in skip:
        if end <= place:
            continue
        found = pattern.search(text, place, max(place, start))
        if found is not None:
            return found
        place = max(place, end)
    return pattern.search(text, place)
