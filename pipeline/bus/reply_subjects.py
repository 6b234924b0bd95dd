"""Decides where an answer may go: only to an inbox. Counts requests that name another subject. Pure.

The sender of a request chooses its reply subject, so a service must not publish on just any of them. The server's
permissions decide which inboxes a service may answer to. A refused answer ends nothing.
"""

import re

__all__ = ["MAX_REPLY_CHARS", "RefusedReplies", "is_inbox", "refused_publication"]

MAX_REPLY_CHARS = 256
"""Longest reply subject that is answered; an honest one has less than 100."""
# Requests from another account arrive with a reply subject below _R_, made by the server. The client reports refusals
# in lower case.
_INBOX = re.compile(r"_INBOX(?:_[\w-]+)?|_R_", re.ASCII | re.IGNORECASE)
_TOKENS = re.compile(r"(?:\.[^\s.*>]+)+", re.ASCII)
_REFUSED = re.compile(r'permissions violation for publish to "(.*)"', re.IGNORECASE | re.DOTALL)
_MAX_QUOTED_CHARS = 80
_LOG_INTERVAL_S = 60.0


def is_inbox(subject: str, own_prefix: str = "_INBOX") -> bool:
    """Return whether `subject` is an inbox.

    One under `own_prefix` or that of any identity, or another account's.
    """
    if len(subject) > MAX_REPLY_CHARS or not subject.isascii() or not subject.isprintable():
        return False
    if subject.lower().startswith(f"{own_prefix.lower()}."):
        return _TOKENS.fullmatch(subject, len(own_prefix)) is not None
    found = _INBOX.match(subject)
    return found is not None and _TOKENS.fullmatch(subject, found.end()) is not None


def refused_publication(error: str) -> str | None:
    """Return the subject that the server refused to publish on; None if `error` says something else."""
    found = _REFUSED.search(error)
    return found[1] if found else None


class RefusedReplies:
    """Counts the requests that got no answer because of the reply subject they named."""

    def __init__(self) -> None:
        self.count = 0
        self._subject = ""
        self._at_s = 0.0

    def record(self, subject: str, now_s: float) -> bool:
        """Count a request that named `subject`; return whether it is the first for a minute."""
        is_news = not self.count or now_s - self._at_s > _LOG_INTERVAL_S
        self.count += 1
        self._subject = subject if len(subject) <= _MAX_QUOTED_CHARS else subject[:_MAX_QUOTED_CHARS] + "..."
        self._at_s = now_s
        return is_news

    def summary(self, now_s: float) -> str | None:
        """Return what a person should know of it; None if there was no such request for a minute.

        The text is the same each time: how many there were is a metric.
        """
        if not self.count or now_s - self._at_s > _LOG_INTERVAL_S:
            return None
        return (
            "requests were not answered, because their reply subject is not a permitted inbox; "
            "the sender has a key or token of this run"
        )

    def describe(self) -> str:
        """Return the note for a log, with the last reply subject."""
        return (
            f"a request was not answered, the first for a minute ({self.count} so far): its reply subject "
            f"{self._subject!a} is not a permitted inbox; the sender has a key or token of this run"
        )
