"""Keeps secrets out of what people, agents and other services see.

Only this module decides which parts of a configuration are secret. Every output uses it: logs, errors, status, pages,
`config show`, agents' tools, promotions and experiment trackers.

A value is secret if its name says so, wherever it stands; so are the credentials in addresses, texts in the form of the
usual providers' keys, and every value that this process has loaded as a secret or has in a variable of such a name,
wherever it turns up again.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

from lachesis.pipeline.common.safe_text import MASK, hide, without_hidden
from lachesis.schemas.errors import ConfigError

__all__ = ["MASK", "is_secret_name", "key_in_variable", "masked", "remember_secrets", "without_secrets"]

_NAMES = (
    r"(?:(?:api|access|private|secret|signing|encryption|shared|master|subscription|account|license|service|host|admin"
    r"|auth|client|deploy|ssh|tls|ssl|hmac|aes|rsa|webhook|server|judge|gateway|azure|openai|anthropic|google|gemini"
    r"|mistral|groq|together|openrouter|deepseek|wandb|hf|aws)_?keys?|(?<!per_)tokens?"
    r"|pass(?:word|wd|phrase|code)?s?|pwd|pw|secrets?|cred(?:ential)?s?|auth|authorization|cookies?|bearer|jwts?|otp|hmac"
    r"|nkey|seed_phrase|mnemonic|signature|sas|dsn|connection_string)"
)
_SECRET = re.compile(rf"(?:^|_){_NAMES}(?:_?v?\d+|_(?:value|text|string|pem|der|hash|b64|base64|header))*$")
_COUNTED = re.compile(
    r"(?:^|_)(?:max|min|longest|n|num|per|total|new|stop|top|pad|eos|bos|unk|sep|cls|mask|begin|end|image|think|thinking"
    r"|special|prompt|completion|response)_(?:[a-z]+_)*tokens?$|^tokens$"
)
"""Names of numbers and kinds of a model's tokens."""
_WORKING_FOLDER = "PWD"
"""The shells' variable, which holds no password; a setting of that name may."""
_USERINFO = re.compile(r"(?<=://)[^/\s,]*@")  # up to the last @ of the address: passwords may hold one, too
_QUERY = re.compile(
    r"(?<=[?&;#])([^=&\s?#;]*(?:key|token|secret|passw(?:or)?d|pwd|sig|signature|auth|credential)s?)=[^&#;\s'\"]+",
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"((?<![\w-])--?[A-Za-z0-9_-]*(?:key|token|secret|password|passwd|credentials?)(?:=|\s+))(?!-)[^\s'\"]+",
    re.IGNORECASE,
)
_HEADER = re.compile(r"(\bBearer|[:=]\s*['\"]?(?:Basic|Token))(\s+|%20)(?!\*)[A-Za-z0-9._~+/=%-]{8,}", re.IGNORECASE)
_NAMED = re.compile(
    r"""(?<![\w-])(?P<name>[A-Za-z][\w-]{0,63})(?P<between>=|['"]:\s*(?=['"]))"""
    r"""(?P<value>"[^"]+"|'[^']+'|[^\s'"&,;()\[\]{}]+)"""
)
"""A name with its value, as programs are given it and as dictionaries are printed."""
_NO_SECRETS = re.compile(r"[-+.\deE]+|True|False|None|null|true|false|.*\*\*\*.*", re.DOTALL)
_FIELD = re.compile(
    r"((?<![\w-])(?:[\w-]{1,64}-Key|(?:Set-)?Cookie|Authorization):\s*)(?!\*|(?:Basic|Bearer|Token)\s)[^\s'\",]+",
    re.IGNORECASE,
)
_KEYS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"
    r"(?:\.[A-Za-z0-9_-]*)?|S[UANOC][A-Z2-7]{56})"
)
_HOOKS = re.compile(
    r"((?:hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks|api\.telegram\.org/bot))[^\s'\"?#]+"
)


def is_secret_name(name: str) -> bool:
    """Return whether a setting, parameter, header or variable of this name holds a secret."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2])
    plain = re.sub(r"[^a-z0-9]+", "_", plain.lower()).strip("_")
    return _SECRET.search(plain) is not None and _COUNTED.search(plain) is None


def without_secrets(text: str) -> str:
    """Return the text without credentials of addresses, headers and options, and without known secrets."""
    text = _QUERY.sub(rf"\1={MASK}", _USERINFO.sub(f"{MASK}@", text))
    text = _OPTION.sub(rf"\1{MASK}", _HEADER.sub(rf"\1\2{MASK}", text))
    text = _HOOKS.sub(rf"\1/{MASK}", _KEYS.sub(MASK, text))
    text = _FIELD.sub(rf"\1{MASK}", _NAMED.sub(_masked_pair, text))
    return without_hidden(text)


def _masked_pair(found: re.Match[str]) -> str:
    value = found["value"]
    quote = value[0] if value[0] in "'\"" else ""
    if not is_secret_name(found["name"]) or _NO_SECRETS.fullmatch(value.strip("'\"")):
        return found[0]
    return f"{found['name']}{found['between']}{quote}{MASK}{quote}"


def remember_secrets(tree: Any, name: str = "") -> None:
    """Remember the secret values of a configuration, so that they are masked wherever a text repeats them.

    With them those of this process's variables: a configuration may take them from there.
    """
    for variable, value in os.environ.items():
        if is_secret_name(variable) and variable != _WORKING_FOLDER:
            hide(value)
    for value in _secret_texts(name, tree, secret=False):
        hide(value)


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
    counts = isinstance(value, bool) or (isinstance(value, int | float) and name.endswith("tokens"))
    if is_secret_name(name) and value is not None and not counts:
        return _all_masked(value)
    if isinstance(value, dict):
        return {key: masked(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(name, inner) for inner in value]
    return without_secrets(value) if isinstance(value, str) else value


def _all_masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _all_masked(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_all_masked(inner) for inner in value]
    return None if value is None else MASK


def _secret_texts(name: str, value: Any, *, secret: bool) -> Iterator[str]:
    secret = secret or is_secret_name(name)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _secret_texts(str(key), inner, secret=secret)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secret_texts(name, inner, secret=secret)
    elif isinstance(value, str) and secret:
        yield value
    elif isinstance(value, str):
        for found in _USERINFO.findall(value):
            yield from found.removesuffix("@").split(":")[-1:]
