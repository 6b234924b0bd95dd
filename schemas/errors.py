"""The errors of the wire: of a setting, a message or an answer that cannot be used.

All others are in `pipeline/errors.py`.
"""

from typing import Self

__all__ = [
    "ConfigError",
    "DataError",
    "LachesisError",
    "SchemaError",
    "VersionError",
]


class LachesisError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(LachesisError, ValueError):
    """Raised when a setting is unknown, has the wrong type or contradicts another; the text names the setting."""


class DataError(LachesisError, ValueError):
    """Raised when a message or an answer is itself bad; it is dead-lettered with this text and never retried."""


class SchemaError(DataError):
    """Raised when bytes do not decode to the event they claim to be, or break one of its invariants."""


class VersionError(SchemaError):
    """Raised when a message speaks a newer schema version than this build reads.

    If one of its writers says in its heartbeat that it writes that version (`bus.newer_writers`), nothing is wrong but
    the build: the reader stops and leaves it to its upgraded self. If none does, the message is bad as any other.
    """

    def __init__(self, text: str, version: int = 0) -> None:
        super().__init__(text)
        self.version = version
        """The version that the message says."""

    def __reduce__(self) -> tuple[type[Self], tuple[str, int]]:
        return type(self), (str(self), self.version)
