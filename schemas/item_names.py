"""Names of items: those that clients elsewhere give, and the one of an item without a name."""

import hashlib
from typing import Any, Final

from lachesis.schemas.errors import SchemaError

__all__ = ["MAX_ITEM_NAME_BYTES", "check_item_name", "is_item_name", "name_of_prompt"]

MAX_ITEM_NAME_BYTES: Final = 128
"""Of a name in UTF-8."""
_PROMPT_PREFIX: Final = "prompt-"


def check_item_name(what: str, name: Any) -> str:
    """Return `name` if a client may call an item so. Raises `SchemaError` naming `what` and the reason."""
    if not isinstance(name, str):
        raise SchemaError(f"{what}: {name!r:.40} is no text; an item's name is")
    if not name or not name.isprintable():  # which lone surrogates are not either
        raise SchemaError(f"{what}: {name[:40]!r} is empty, or has characters that cannot be printed")
    size = len(name.encode())
    if size > MAX_ITEM_NAME_BYTES:
        raise SchemaError(f"{what}: {name[:40]!r}... has {size} bytes, where {MAX_ITEM_NAME_BYTES} are allowed")
    if name.startswith(_PROMPT_PREFIX):
        raise SchemaError(f"{what}: {name[:40]!r} begins with {_PROMPT_PREFIX!r}, as items without a name are called")
    return name


def is_item_name(name: str) -> bool:
    """Return whether a client gave this name."""
    try:
        check_item_name("item", name)
    except SchemaError:
        return False
    return True


def name_of_prompt(tokens: bytes) -> str:
    """Return what an item without a name is called: the same for the same int32 `tokens` of its prompt."""
    return f"{_PROMPT_PREFIX}{hashlib.sha256(tokens).hexdigest()[:16]}"
