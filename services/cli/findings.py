"""Findings, as `verify` and `reproduce` print them, and the exit code that guards what comes after."""

import sys
from collections.abc import Sequence

from lachesis.pipeline.offline.verification.checks import NumericFinding
from lachesis.services.output import print_table

__all__ = ["exit_with", "print_findings"]


def print_findings(findings: Sequence[NumericFinding]) -> None:
    """Print them as a table."""
    rows = ((finding.verdict, finding.check, finding.subject, finding.text) for finding in findings)
    print_table(("verdict", "check", "of", "measured"), rows)


def exit_with(findings: Sequence[NumericFinding]) -> None:
    """Exit with 1 if any check failed, else with 0."""
    sys.exit(any(finding.verdict == "fail" for finding in findings))
