"""A finding: what was looked at, how it stands, and how to fix it."""

from typing import Literal

import msgspec

__all__ = ["DoctorFinding", "fail", "ok", "warn"]

Level = Literal["OK", "WARN", "FAIL"]


class DoctorFinding(msgspec.Struct, frozen=True):
    """FAIL: the run cannot work like this. WARN: it can, but something is missing or near its limit."""

    check: str
    level: Level
    text: str
    mend: str | None = None


def ok(check: str, text: str) -> DoctorFinding:
    return DoctorFinding(check, "OK", text)


def warn(check: str, text: str, mend: str) -> DoctorFinding:
    return DoctorFinding(check, "WARN", text, mend)


def fail(check: str, text: str, mend: str) -> DoctorFinding:
    return DoctorFinding(check, "FAIL", text, mend)
