"""Decides which alerts of a window are news, for the log. Pure.

A warning is news in each window. An alert that only informs, for example about a rater that is at odds by design, is
news once: when it begins. It is news again when its subject changes, or after the check has been well in between.
"""

import re
from collections.abc import Iterable

from lachesis.schemas.alerts import Alert

__all__ = ["AlertNovelty"]

_NUMBERS = re.compile(r"(?<![\w-])[-+]?\d[\d.,]*(?:e[-+]?\d+)?%?")


class AlertNovelty:
    """Remembers the last result of each check."""

    def __init__(self) -> None:
        self._last_text: dict[str, str] = {}

    def pick(self, results: Iterable[Alert]) -> list[Alert]:
        """Return the alerts among the results of a window that are worth a line in the log."""
        found = []
        for result in results:
            if result.severity == "idle":
                continue  # nothing to judge by: the last text still holds
            if result.severity == "ok":
                self._last_text.pop(result.check, None)
                continue
            said = f"{result.severity} {_NUMBERS.sub('#', result.reason)}"  # figures differ in each window
            if result.severity != "inform" or self._last_text.get(result.check) != said:
                found.append(result)
            self._last_text[result.check] = said
        return found
