"""Checks the types of a configuration that was made in Python, as the loader checks those of a file."""

from functools import lru_cache
from typing import Any

import msgspec

from lachesis.schemas.errors import ConfigError

__all__ = ["check_field_types"]

_WRONG = (msgspec.ValidationError, TypeError, AttributeError)
"""The latter two are of values that msgspec cannot convert at all, arrays for example."""


def check_field_types(config: msgspec.Struct) -> None:
    """Raise `ConfigError` naming the first field of a wrong type, or outside its declared range.

    For `__post_init__`: what follows there may then compare and count.
    """
    for name, kind in _fields(type(config)):
        value = getattr(config, name)
        if value is msgspec.UNSET:
            continue
        try:
            msgspec.convert(value, kind)
        except _WRONG as error:
            raise ConfigError(f"{type(config).__name__}.{name} is {value!r:.80}: {error}") from error


@lru_cache(maxsize=256)
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.type) for field in msgspec.structs.fields(kind))
