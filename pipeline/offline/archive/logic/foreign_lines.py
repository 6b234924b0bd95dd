"""Defines what an import assumes of lines of another project, and how they are read. Pure."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from lachesis.schemas.rollout import RolloutGroup

__all__ = ["PRODUCER", "UNKNOWN_POLICY", "ImportAssumptions", "ReadLine", "epoch_of"]

UNKNOWN_POLICY = "0-imported-unknown"
"""Policy version of groups whose weights are unknown."""
PRODUCER = "import"


class ImportAssumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the file does not say: environment, weights, tokenizer and time. `longest` and `most` are the environment's
    and the run's bounds on tokens of a sequence and sequences of a group."""

    run: str
    env: str
    longest: int
    most: int
    policy_version: str = UNKNOWN_POLICY
    tokenizer_hash: str = "unknown"
    started_ns: int = 0


ReadLine: TypeAlias = Callable[[bytes, int, Path, int, ImportAssumptions], RolloutGroup]
"""Reads a line: its bytes, its number from 1, the file, what names the file (`epoch_of`), and what is assumed. Raises
`SchemaError`."""


def epoch_of(first: bytes) -> int:
    """Return what names a file by its first line, so that it stays the same when lines are added."""
    return int.from_bytes(hashlib.blake2b(first, digest_size=8).digest()) >> 1
