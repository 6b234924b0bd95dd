"""Keeps secrets out of what people, agents and other services see.

Every output uses this module: logs, errors, status, pages, `config show`, agents' tools, promotions and trackers.

A value is secret if its name says so (`secret_names`), wherever it stands; so is a text that looks like a secret
(`secret_texts`), and whatever this process has loaded as a secret or has in a variable, wherever it turns up again.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any
from urllib.parse import quote, unquote

from lachesis.pipeline.common.safe_text import MASK, hide
from lachesis.pipeline.common.secret_names import is_ambiguous, is_plain_number, is_secret_name
from lachesis.pipeline.common.secret_texts import mask_header, secrets_in, without_secrets
from lachesis.schemas.errors import ConfigError

__all__ = ["MASK", "is_secret_name", "key_in_variable", "masked", "remember_secrets", "without_secrets"]

_OTHER_VARIABLES = frozenset({"PWD", "OLDPWD", "DESKTOP_SESSION", "GDMSESSION"})
"""Variables of shells and desktops whose names look like those of secrets."""
_NAMED_BY_USERS = frozenset({"environments", "evaluation", "mix"})
"""Tables whose keys are names that users chose; they say nothing of the values."""
_NAME_FIELDS = ("name", "key", "header", "variable", "env", "option")
_VALUE_FIELDS = ("value", "val", "default", "content", "text")
"""How a table says a name and its value: `{name = "API_KEY", value = "..."}`."""
_MIN_LINE_CHARS = 16
"""A shorter line of a secret is not looked for by itself."""
_MAX_WORD_CHARS = 16


def remember_secrets(tree: Any, name: str = "") -> None:
    """Remember the secret values of a configuration, so that they are masked wherever a text repeats them.

    With them those of this process's variables: a configuration may take them from there.
    """
    for variable, value in os.environ.items():
        if variable not in _OTHER_VARIABLES:
            _remember(variable, value, secret=False)
    _remember(name, tree, secret=False)


def key_in_variable(variable: str) -> str:
    """Return the key that an environment variable holds, without blanks around it.

    Raises `ConfigError`, which names the variable and never says the key, where there is none that a header can bear.
    """
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {variable} holds no key: set it and try again")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"the environment variable {variable} must hold one word of ASCII characters")
    hide(key)
    return key


def masked(name: str, value: Any) -> Any:
    """Return the setting `name` without credentials in texts and without secret values at any depth.

    A value is secret if its name says so, with all that is in it.
    """
    number = isinstance(value, int | float) and is_plain_number(name)
    if _is_secret_path(name) and value is not None and not isinstance(value, bool) and not number:
        return _all_masked(value)
    if isinstance(value, Mapping):
        return _masked_table(value, named_by_users=name in _NAMED_BY_USERS)
    if isinstance(value, list | tuple | AbstractSet):
        return _masked_list(name, list(value))
    return without_secrets(mask_header(value)) if isinstance(value, str) else value


def _is_secret_path(name: str) -> bool:
    """Whether the last part of a path says so, or one above it that lies in parameters."""
    _, params, inner = name.partition(".params.")
    if not params and name.rpartition(".")[0].rpartition(".")[2] in _NAMED_BY_USERS:
        return False
    return is_secret_name(name) or (params != "" and any(map(is_secret_name, inner.split("."))))


def _masked_table(table: Mapping[Any, Any], *, named_by_users: bool) -> dict[Any, Any]:
    found = {_shown_key(key): masked("" if named_by_users else str(key), inner) for key, inner in table.items()}
    named = next((table[field] for field in _NAME_FIELDS if isinstance(table.get(field), str)), "")
    if is_secret_name(named):
        found |= {field: _all_masked(table[field]) for field in _VALUE_FIELDS if field in table}
    return found


def _shown_key(key: Any) -> Any:
    return without_secrets(key) if isinstance(key, str) else key


def _masked_list(name: str, values: Sequence[Any]) -> list[Any]:
    """Mask a list, in which a secret may follow its name: as an option of a command, or in a list of pairs."""
    found: list[Any] = []
    for value, before in zip(values, ("", *values), strict=False):
        pair = isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(one, str) for one in value)
        if pair and is_secret_name(value[0]):
            found.append([value[0], MASK])
        elif isinstance(value, str) and _is_option(before):
            found.append(MASK)
        else:
            found.append(masked(name, value))
    return found


def _is_option(text: Any) -> bool:
    return isinstance(text, str) and text.startswith("-") and "=" not in text and is_secret_name(text)


def _all_masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _all_masked(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | AbstractSet):
        return [_all_masked(inner) for inner in value]
    return None if value is None else MASK


def _remember(name: str, value: Any, *, secret: bool) -> None:
    for found in _secret_values(name, value, secret=secret):
        for text in (found, *(line for line in found.splitlines() if len(line) >= _MIN_LINE_CHARS)):
            for spelling in {text, json.dumps(text)[1:-1], repr(text)[1:-1], quote(text, safe=""), unquote(text)}:
                hide(spelling)


def _secret_values(name: str, value: Any, *, secret: bool) -> Iterator[str]:
    secret = secret or is_secret_name(name)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secret_values("" if name in _NAMED_BY_USERS else str(key), inner, secret=secret)
        table = _masked_table(value, named_by_users=False)
        yield from (
            value[field] for field in _VALUE_FIELDS if table.get(field) == MASK and isinstance(value[field], str)
        )
    elif isinstance(value, list | tuple | AbstractSet):
        shown = _masked_list("", list(value))
        for inner, after in zip(value, shown, strict=True):
            if isinstance(inner, list | tuple) and after == [*inner[:1], MASK]:
                yield inner[1]
            yield from _secret_values(name, inner, secret=secret or after == MASK)
    elif isinstance(value, str):
        if secret and not (is_ambiguous(name) and value.isalpha() and len(value) < _MAX_WORD_CHARS):
            yield value
        yield from secrets_in(value)
    elif secret and isinstance(value, int) and not isinstance(value, bool) and not is_plain_number(name):
        yield str(value)
