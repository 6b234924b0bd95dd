"""Finds a model's thoughts, by `<think>...</think>` and similar markers, and its answer after them.

A chat template may open the thought in the prompt, so an answer may have only the closing marker: then everything
before it is thought. A thought inside a thought ends at its own closing marker, and the outer one continues. A thought
that is not closed continues to the end. This is the only list of markers, for raters, bonuses, sessions and servers.
"""

import re
from collections.abc import Sequence

__all__ = [
    "OPENED_KEY",
    "PROMPT_END_TOKENS",
    "answer_part",
    "closes_thought",
    "has_one_thought",
    "opened_thought",
    "thought_opener",
    "thought_spans",
]

OPENED_KEY = "prompt_opens"
"""Key in a rollout group's metadata of the marker that its prompts end with."""
PROMPT_END_TOKENS = 24
"""Tokens at the end of a prompt in which a template opens a thought; at worst each is one character."""
_TAIL_CHARS = 64
_MAX_MARKERS = 512
"""Markers in one thought; a text with more is thought to its end."""
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
_OPENERS_OF_KIND = [re.compile(opener, re.IGNORECASE) for opener, _ in _MARKERS]
_CLOSERS = [re.compile(closer, re.IGNORECASE) for _, closer in _MARKERS]
_LONE_CLOSERS = re.compile(_FIRST + "(?:" + "|".join(closer for _, closer in _MARKERS[:-1]) + ")", re.IGNORECASE)
"""Those that may close what the prompt opened."""
_REPEATED = [re.compile(rf"\s*(?:{opener})", re.IGNORECASE) for opener, _ in _MARKERS[:-1]]
_BEFORE_ANSWER = re.compile(rf"{_LONE_CLOSERS.pattern}|<\|channel\|>\s*final\s*<\|message\|>", re.IGNORECASE)
_EITHER = [re.compile(rf"({opener})|(?:{closer})", re.IGNORECASE) for opener, closer in _MARKERS[:-1]]
"""Opening, as group 1, or closing markers of the kinds that may hold one another."""
_EITHER_OF_ALL = re.compile(
    _FIRST + "(?:(" + "|".join(one for one, _ in _MARKERS[:-1]) + ")|" + _LONE_CLOSERS.pattern + ")", re.IGNORECASE
)
_AT_END = re.compile(rf"(?:{_OPENERS.pattern})\s*\Z", re.IGNORECASE)


def answer_part(completion: str) -> str:
    """Return the text after the last thought: all if there was none, "" if the thought did not end."""
    lower = completion.lower()
    if not any(hint in lower for hint in _HINTS):
        return completion
    start = 0
    for end in _BEFORE_ANSWER.finditer(completion):
        start = end.end()
    return "" if _OPENERS.search(completion, start) is not None else completion[start:]


def opened_thought(prompt: str) -> str:
    """Return the marker with which a prompt, or its end, opens a thought; "" if it opens none.

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
        place = _end_of_opened(text, skip)
        spans.append((0, place))
    while (found := _outside(_OPENERS, text, place, skip)) is not None:
        place = _end(text, found, skip)
        spans.append((found.start(), place))
    return spans


def thought_opener(text: str) -> str:
    """Return the opening marker if a text is only that, perhaps with its closing one; else ""."""
    for opener, closer in zip(_OPENERS_OF_KIND, _CLOSERS, strict=True):
        found = opener.match(text)
        if found is not None:
            rest = text[found.end() :].removeprefix("...").removeprefix("…")
            return found.group() if not rest or closer.fullmatch(rest) else ""
    return ""


def closes_thought(marker: str) -> bool:
    """Return whether a text is a closing marker."""
    return any(closer.fullmatch(marker) for closer in _CLOSERS)


def has_one_thought(completion: str, opener: str) -> bool:
    """Return whether a completion has one thought of this marker, closed, and text after it."""
    kind = next((kind for kind, one in enumerate(_OPENERS_OF_KIND) if one.fullmatch(opener)), None)
    if kind is None or opener not in completion:
        return False
    openers = list(_OPENERS_OF_KIND[kind].finditer(completion))
    closers = list(_CLOSERS[kind].finditer(completion))
    closed = len(closers) == 1 if kind < len(_EITHER) else any(one.start() > openers[0].start() for one in closers)
    in_order = closed and len(openers) == 1 and openers[0].start() < closers[-1].start()
    return in_order and answer_part(completion).strip() != ""


def _end(text: str, opener: re.Match[str], skip: Sequence[tuple[int, int]]) -> int:
    """Return where a thought ends: after its own closing marker, or at the end of the text."""
    kind = (opener.lastindex or 1) - 1
    if kind >= len(_EITHER):
        closed = _CLOSERS[kind].search(text, opener.end())
        return len(text) if closed is None else closed.end()
    begun, repeated = opener.end(), 0
    while (again := _REPEATED[kind].match(text, begun)) is not None:
        begun, repeated = again.end(), repeated + 1
    end, depth = _matching(_EITHER[kind], text, begun, skip, 1 + repeated)
    # an opening may be written twice (by the template and by the model) and closed once
    return end if depth <= repeated else len(text)


def _end_of_opened(text: str, skip: Sequence[tuple[int, int]]) -> int:
    """Return the end of a thought that the prompt opened. A model may open it again, and close it once."""
    end, depth = _matching(_EITHER_OF_ALL, text, 0, skip, 1)
    if depth == 0:
        return end
    place = end = 0
    while (found := _outside(_LONE_CLOSERS, text, place, skip)) is not None:
        end = place = found.end()
    return end or len(text)


def _matching(
    markers: re.Pattern[str], text: str, place: int, skip: Sequence[tuple[int, int]], depth: int
) -> tuple[int, int]:
    """Return the end of the marker that leaves the fewest thoughts open, of `depth` at `place`, and their number."""
    end, least = len(text), depth
    for _ in range(_MAX_MARKERS):
        found = _outside(markers, text, place, skip) if least else None
        if found is None:
            return end, least
        depth += 1 if found[1] is not None else -1
        place = found.end()
        if depth < least:
            end, least = place, depth
    return len(text), depth


def _closes_first(text: str, skip: Sequence[tuple[int, int]]) -> bool:
    """Return whether a closing marker comes before any opening one."""
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
