"""Reads the key for Tinker from the environment. No returned sentence contains it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError

__all__ = ["KEY_VARIABLE", "check_key", "key_problem", "read_key"]

KEY_VARIABLE = "TINKER_API_KEY"
_BEGINNINGS = ("tml-", "eyJ")
"""How keys begin, by the SDK: a key, or a token (JWT) in its place."""


def key_problem(environment: Mapping[str, str]) -> str | None:
    """Return what is wrong with the key, None if nothing is seen to be."""
    key = environment.get(KEY_VARIABLE, "").strip()
    if not key:
        return f'training.backend is "tinker", but the variable {KEY_VARIABLE} holds no key'
    if not key.startswith(_BEGINNINGS):
        return f"the variable {KEY_VARIABLE} holds no key of Tinker's, which begins with tml-"
    return None


def read_key(environment: Mapping[str, str]) -> str:
    """Return the key. Raises `StartupError` that says how to set it."""
    problem = key_problem(environment)
    if problem is not None:
        raise StartupError(f"{problem}; set it where the run is started: export {KEY_VARIABLE}=tml-...")
    return environment[KEY_VARIABLE].strip()


def check_key(config: RunConfig) -> Iterator[DoctorFinding]:
    """Yield whether there is a key, where the run is to be trained at Tinker."""
    if config.mode != "train" or config.training.backend != "tinker":
        return
    problem = key_problem(os.environ)
    if problem is None:
        yield ok("tinker", "there is a key")
    else:
        yield fail("tinker", problem, f"export {KEY_VARIABLE}=tml-...")
