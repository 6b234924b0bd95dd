"""Says in one line why a service's process ended, by the end of its log. Pure."""

import re
from collections.abc import Sequence
from typing import Final

from lachesis.pipeline.common.cut_text import cut_middle
from lachesis.services.process.reaper import LOG_NAME
from lachesis.services.supervisor.restarts import describe_crash

__all__ = ["LOOKED_AT_LINES", "last_words"]

LOOKED_AT_LINES: Final = 200
"""Lines at the end of a log among which the reason is looked for: a crash writes all threads' stacks."""
_MAX_CHARS = 500
_HEAD = re.compile(r"^[\d-]+ [\d:,]+ [A-Z]+ \S+ ")
"""Time, level and service at the beginning of a line of a service's log."""
_REAPER = re.compile(rf"^[\d-]+ [\d:,]+ INFO {LOG_NAME} ")
"""What the reaper ended is no reason."""
_RULE = re.compile(r"^[\s|+-]*$")
"""A line of a traceback of several errors that only separates them."""
_TRACEBACK = "Traceback (most recent call last):"


def last_words(lines: Sequence[str], *, drained: bool, noted: bool) -> str:
    """Return the reason that a process logged last, without time and name; empty: it gave none.

    A line that says that it worked is no reason, unless it drained. Nor is a warning of what it survived, if it did not
    say by itself that it ends (`noted`).
    """
    if (crash := describe_crash(lines)) is not None:
        return cut_middle(crash, _MAX_CHARS)
    kept = [line for line in lines if not _RULE.match(line) and not _REAPER.match(line)]
    if not kept:
        return ""
    head = next((i for i in reversed(range(len(kept))) if _HEAD.match(kept[i])), None)
    if head is not None and not drained:
        level = kept[head].split()[2]
        is_alone = head == len(kept) - 1
        if is_alone and (level == "INFO" or (level == "WARNING" and not noted)):
            return ""
        if level == "WARNING" and not noted and kept[head + 1].strip() == _TRACEBACK:
            return ""
    return cut_middle(_HEAD.sub("", kept[-1]).strip(" |"), _MAX_CHARS)
