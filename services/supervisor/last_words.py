"""Says in one line why a service's process ended, by the end of its log. Pure."""

import re
from collections.abc import Sequence
from typing import Final

from lachesis.services.process.reaper import LOG_NAME
from lachesis.services.supervisor.restarts import describe_crash

__all__ = ["LOOKED_AT_LINES", "last_words"]

LOOKED_AT_LINES: Final = 200
"""Lines at the end of a log among which the reason is looked for: a crash writes all threads' stacks."""
_MAX_CHARS = 500
_HEAD = re.compile(r"^[\d-]+ [\d:,]+ (?P<level>[A-Z]+) \S+ ")
"""Time, level and service at the beginning of a line of a service's log."""
_REAPER = re.compile(rf"^[\d-]+ [\d:,]+ INFO {LOG_NAME} ")
"""What the reaper ended is no reason."""
_RULE = re.compile(r"^[\s|+-]*$")
"""A line of a traceback of several errors that only separates them."""
_TRACEBACK = "Traceback (most recent call last):"


def last_words(lines: Sequence[str], *, drained: bool, noted: bool) -> str:
    """Return the reason that a process logged last in its life, without time and name; empty: it gave none.

    A line that says that it worked is no reason, unless it drained, nor is an error that it logged and survived.
    `noted`: whether it said by itself that it ends.
    """
    if (crash := describe_crash(lines)) is not None:
        return crash[:_MAX_CHARS]
    kept = [line for line in lines if not _RULE.match(line) and not _REAPER.match(line)]
    if not kept:
        return ""
    head = next((i for i in reversed(range(len(kept))) if _HEAD.match(kept[i])), None)
    if head is not None and not drained:
        level = _HEAD.sub(r"\g<level>\n", kept[head]).partition("\n")[0]
        is_last = head == len(kept) - 1
        survived = not noted and level == "WARNING" and not is_last and kept[head + 1].strip() == _TRACEBACK
        if survived or (is_last and level == "INFO"):
            return ""
    return _HEAD.sub("", kept[-1]).strip(" |")[:_MAX_CHARS]
