"""Sizes in bytes as people write them: 500MB, 512 MiB, 1GiB."""

import re

from lachesis.schemas.errors import ConfigError

__all__ = ["is_byte_setting", "parse_bytes"]

_SIZE = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)\s*(?:([kmgtp])(i?)b?|b|bytes?)?", re.IGNORECASE)
_MAX_CHARS = 64
"""Characters of a size; no sensible one has more."""


def parse_bytes(text: str) -> int:
    """Return a size in bytes.

    The text is a number, with or without a unit of 1000 (KB, MB, ...) or 1024 (KiB, MiB, ...).

    Raises `ConfigError` if the text is no size.
    """
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _MAX_CHARS else None
    if match is None:
        raise ConfigError(
            f"{text[:_MAX_CHARS]!r} is no size: give bytes, or a number with a unit, such as 500MB or 2GiB"
        )
    number, letter, binary = match.groups()
    power = "kmgtp".index(letter.lower()) + 1 if letter else 0
    unit: int = (1024 if binary else 1000) ** power
    if "." not in number:
        return int(number) * unit
    if power == 0:
        raise ConfigError(f"{text!r} is no size: a byte has no parts")
    return int(float(number) * unit)


def is_byte_setting(name: str) -> bool:
    """Whether a setting of this name is a size in bytes; every one of them says so in its name."""
    return "bytes" in name.split("_")
