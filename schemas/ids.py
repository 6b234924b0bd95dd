"""Identifiers: time-ordered group ids and policy versions."""

import os
import time
from typing import Self

import msgspec

from lachesis.schemas.errors import SchemaError

__all__ = ["PolicyVersion", "epoch_producer", "is_group_id", "is_of_other_epochs", "new_group_id"]

_HEX = frozenset("0123456789abcdef")
_EPOCHS = "epoch-"


def new_group_id() -> str:
    """Return a new 128-bit id as 32 hex digits.

    48 bits of Unix time in ms, then random bits (as UUID version 7).
    """
    ms = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (ms << 80) | random
    value = (value & ~(0xF << 76)) | (0x7 << 76)  # version 7
    value = (value & ~(0x3 << 62)) | (0x2 << 62)  # RFC 9562 variant
    return f"{value:032x}"


def is_group_id(text: str) -> bool:
    """Return whether `text` has the form of a group id."""
    return len(text) == 32 and _HEX.issuperset(text)


def epoch_producer(env: str) -> str:
    """Return the name that groups of an environment's epochs bear as their producer."""
    return f"{_EPOCHS}{env}"


def is_of_other_epochs(producer: str, env: str) -> bool:
    """Return whether a group of `env` bears another environment's epochs as its producer."""
    return producer.startswith(_EPOCHS) and producer != epoch_producer(env)


class PolicyVersion(msgspec.Struct, frozen=True, order=True):
    """Names one set of weights: optimizer step, lineage (which training attempt) and a digest of the weights.

    Two different weights never share a version: a trainer that restarts behind its last step starts a new lineage.
    """

    step: int
    lineage: str
    digest: str

    def __str__(self) -> str:
        return f"{self.step}-{self.lineage}-{self.digest}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the version that `str()` wrote. Raises `SchemaError`."""
        step, _, rest = text.partition("-")
        lineage, _, digest = rest.partition("-")
        # isdecimal alone admits other scripts' digits; the bound keeps int() from a megabyte of them
        if not (step.isascii() and step.isdecimal() and len(step) <= 18 and lineage and digest and len(text) <= 128):
            raise SchemaError(f"policy version {text[:80]!r} is not <step>-<lineage>-<digest>")
        return cls(int(step), lineage, digest)
