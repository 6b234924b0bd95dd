"""Keeping secrets out of what people see: logs, errors, status, `config show`, experiment trackers."""

import os
import re
from typing import Any

from lachesis.schemas.errors import ConfigError

__all__ = ["MASK", "key_in_variable", "masked", "without_secrets"]

MASK = "***"

_USERINFO = re.compile(r"(?<=://)[^/\s,]*@")  # up to the last @ of the address: passwords may hold one, too
_QUERY = re.compile(r"(?<=[?&])([^=&\s]*(?:key|token|secret|password|sig|signature))=[^&#\s'\"]+", re.IGNORECASE)
_SECRET = re.compile(
    r"(^|(?<!per)_)((api|access|private)_?key|token|password|passwd|secret|credentials?)$", re.IGNORECASE
)


def without_secrets(text: str) -> str:
    """Return the text with every address in it without user, password or token, in its query too."""
    return _QUERY.sub(rf"\1={MASK}", _USERINFO.sub(f"{MASK}@", text))


def key_in_variable(variable: str) -> str:
    """Return the key that an environment variable holds, without blanks around it.

    Raises `ConfigError`, which names the variable and never says the key, where there is none that a header can bear.
    """
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {variable} holds no key: set it and try again")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"the environment variable {variable} must hold one word of ASCII characters")
    return key


def masked(name: str, value: Any) -> Any:
    """Return the setting `name` without credentials in URLs and without secret values at any depth.

    A value is secret if its name says so.
    """
    if isinstance(value, dict):
        return {key: masked(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [masked(name, inner) for inner in value]
    if _SECRET.search(name) and value is not None:
        return MASK
    return without_secrets(value) if isinstance(value, str) else value
