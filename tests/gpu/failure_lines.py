"""A plugin of pytest that prints each failure's last lines as it comes: a run that is stopped says why tests failed."""

import sys
from typing import Any

__all__ = ["pytest_runtest_logreport"]

_LAST_CHARACTERS = 600


def pytest_runtest_logreport(report: Any) -> None:
    """Print what failed; with xdist, in the process that has all reports."""
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when}): {report.longreprtext[-_LAST_CHARACTERS:]}", file=sys.stderr)
