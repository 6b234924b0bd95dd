"""Finds secrets in texts by their form: addresses, headers, options, named values, providers' keys.

No pattern takes more than linear time, so that a text from elsewhere holds no process up.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from urllib.parse import unquote

from lachesis.pipeline.common.safe_text import MASK, without_hidden
from lachesis.pipeline.common.secret_names import is_secret_header, is_secret_name

__all__ = ["error_text", "mask_header", "mask_secrets", "secrets_in", "without_secrets"]

_SCHEME = r"(?:Basic|Bearer|Token|ApiKey|Digest|Negotiate)"
_NAME = r"(?P<name>[A-Za-z][\w.-]{0,127})"
_QUOTED = r"(?P<quote>\\{0,3}['\"])(?P<secret>(?:(?!(?P=quote))(?:\\.|[^\n\\]))+)(?:(?P=quote)|\Z)"
_BARE = r"(?P<bare>[^\s'\"&,;()\[\]{}=][^\s'\"&,;()\[\]{}]*)"
_BLOCK = r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----(?P<secret>.+?)(?:-----END|\Z)"
_ADDRESSES = (
    # to the last @ of it, since passwords may hold one, too
    r"(?<=://)(?P<secret>(?:(?!,\w{1,12}://|['\"](?:[\s,:\])}]|\Z))[^/\s])+)@",
    # a slash in the password, which no port holds
    r"(?<=://)(?P<secret>[^/\s:@'\"]{1,256}:(?!\d{1,5}[/?#])[^\s@'\"]{1,256})@",
    # without its scheme
    r"(?<![\w/:.@+-])(?P<secret>[\w.+%-]{1,64}:[^\s@/:'\",]{1,256})@(?=(?:localhost|[\w-]{1,64}(?:\.[\w-]{1,64}|:\d))\b)",
    # webhooks: who knows the address may use it
    r"(?:hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks)/(?P<secret>[^\s'\"?#]+)",
    r"api\.telegram\.org/bot/?(?P<secret>[^\s'\"?#]+)",
)
_HEADERS = (
    rf"(?<![\w-])(?:Proxy-)?Authorization:\s*(?:{_SCHEME}\s+)?+(?!\*)(?P<secret>[^\s'\",]+)",
    r"(?<![\w-])(?:Set-)?Cookie:\s*(?!\*)(?P<secret>[^\r\n'\"]+)",
    r"\bBearer(?:\s+|%20)(?!\*)(?P<secret>[A-Za-z0-9._~+/=%-]{8,})",
    r"[:=]\s*['\"]?(?:Basic|Token)(?:\s+|%20)(?!\*)(?P<secret>[A-Za-z0-9._~+/=%-]{8,})",
    r"\A\s*(?:Bearer|ApiKey|Token(?=\s+\S*\d)|Basic(?=\s+\S*(?:(?-i:[a-z]\S*[A-Z])|\d|=)))\s+(?!\*)(?P<secret>\S+)\s*\Z",
    r"(?<![\w-])(?:-u|--user|--proxy-user)[\s=]+(?!\*)(?P<secret>[^\s:'\"]{1,64}:[^\s'\"]+)",
)
_BODY = r"(?:[A-Za-z0-9]{20,}|(?=[A-Za-z]{0,64}\d)[A-Za-z0-9]{10,})"
_KEYS = (
    r"(?<![\w-])(?P<secret>sk-(?:[\w-]{16,}|(?=[A-Za-z_-]{0,64}\d)[\w-]{8,}))",
    rf"\b(?P<secret>(?:hf_|gh[pousr]_|gsk_|npm_|r8_|xai-|pplx-|whsec_|dop_v1_|lin_api_|(?:sk|rk|pk)_(?:live|test)_){_BODY})",
    (
        r"\b(?P<secret>(?:github_pat_|gl(?:pat|sa|c)[-_]|pypi-|ya29\.|hv[sbr]\.|nvapi-|dckr_pat_|wandb_v\d_|lsv2_|tgp_v\d_)"
        r"[\w.-]{16,})"
    ),
    (
        r"\b(?P<secret>xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,}"
        r"|A(?:KIA|SIA)(?:[A-Z0-9]{16}|(?=[A-Z]{0,32}\d)[A-Z0-9]{12,})|SG\.[\w-]{16,}\.[\w-]{16,}|AGE-SECRET-KEY-[A-Z0-9]{20,}"
        r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?|S[UANOC][A-Z2-7]{56})"
    ),
)
_QUERY_NAMES = frozenset({"key", "sig", "code"})
_NO_SECRETS = re.compile(r"[-+]?\d{1,5}|[-+]?\d*\.\d+(?:e[-+]?\d+)?|true|false|null|none", re.IGNORECASE)
"""Values that name no secret in `name=value`, as in "max_token=5"."""
_MAX_ERROR_CHARS = 8192
"""Of an error, that are read: users' code repeats whole answers in errors, and one million would take a second."""
_MAX_CUT_CHARS = 1024
"""At the end of what is read, that are not shown: a secret that was cut there may no longer look like one."""


def _is_secret_in_query(name: str) -> bool:
    return is_secret_name(unquote(name)) or name.lower() in _QUERY_NAMES


def _is_secret_option(name: str) -> bool:
    return is_secret_name(name) or name == "key"


def _is_secret_field(name: str) -> bool:
    return is_secret_header(name) or name.lower().endswith("-key")


def _is_other_field(name: str) -> bool:
    """Whether it is a field that the patterns of `_HEADERS` do not read."""
    return _is_secret_field(name) and name.lower().rpartition("-")[2] not in {"authorization", "cookie"}


def _any_name(_: str) -> bool:
    return True


_PATTERNS: list[tuple[re.Pattern[str], Callable[[str], bool]]] = [
    (re.compile(_BLOCK, re.DOTALL), _any_name),
    *((re.compile(one), _any_name) for one in _ADDRESSES),
    (re.compile(r"[?&;#](?P<name>[^=&\s?#;]{1,128})=(?P<secret>[^&#;\s'\"]+)"), _is_secret_in_query),
    *((re.compile(one, re.IGNORECASE), _any_name) for one in _HEADERS),
    (re.compile(r"(?<![\w-])--?(?P<name>[A-Za-z][\w-]{0,63})(?:=|\s+)(?P<secret>(?!-)[^\s'\"]+)"), _is_secret_option),
    (re.compile(rf"(?<![\w-]){_NAME}\s{{0,3}}=\s{{0,3}}(?:{_QUOTED}|{_BARE})"), is_secret_name),  # f(name="value")
    (re.compile(rf"(?<![\w-]){_NAME}\\{{0,3}}['\"]\s*:\s*{_QUOTED}"), is_secret_name),  # {"name": "value"}
    (re.compile(rf"(?<![\w-]){_NAME}:\s{{1,3}}(?P<secret>[^\s'\",]+)"), _is_other_field),
    *((re.compile(one), _any_name) for one in _KEYS),
]
_WHOLE_HEADER = re.compile(rf"\A\s*{_NAME}:\s+(?P<secret>\S.*)\Z", re.DOTALL)


def without_secrets(text: str) -> str:
    """Return the text without credentials of addresses, headers and options, and without known secrets."""
    return without_hidden(mask_secrets(text))


def error_text(error: BaseException) -> str:
    """Return the type and the words of an exception, without the secrets that users' code repeats.

    The end of a very long text is left out.
    """
    text = f"{type(error).__name__}: {error}"
    if len(text) <= _MAX_ERROR_CHARS:
        return without_secrets(text)
    return f"{without_secrets(text[:_MAX_ERROR_CHARS])[:-_MAX_CUT_CHARS]}... ({len(text)} characters)"


def mask_secrets(text: str) -> str:
    """Return the text without what looks like a secret in it."""
    for pattern, is_secret in _PATTERNS:
        text = pattern.sub(partial(_without, is_secret=is_secret), text)
    return text


def mask_header(text: str) -> str:
    """Return a header, written as `Name: value`, without all of a secret value."""
    found = _WHOLE_HEADER.match(text)
    return text if found is None or not _is_secret_field(found["name"]) else _without(found, _any_name)


def secrets_in(text: str) -> Iterator[str]:
    """Yield the secrets that a text holds by its form; of `user:password`, the password alone."""
    for pattern, is_secret in _PATTERNS:
        for found in pattern.finditer(text):
            group = _group(found, is_secret)
            if group is not None:
                user, colon, password = found[group].partition(":")
                yield password if colon and "\n" not in user else found[group]


def _group(found: re.Match[str], is_secret: Callable[[str], bool]) -> str | None:
    """Return the group of a match that holds a secret."""
    named = found.groupdict()
    group = "secret" if named["secret"] is not None else "bare"
    name = named.get("name") or ""
    if not is_secret(name) or MASK in found[group]:
        return None
    if is_secret is not is_secret_name:
        return group
    value = found[group].rstrip("`.:")  # `name = value` in a sentence
    is_count = value.isdecimal() and name.lower().endswith("tokens")
    return None if is_count or _NO_SECRETS.fullmatch(value) else group


def _without(found: re.Match[str], is_secret: Callable[[str], bool]) -> str:
    group = _group(found, is_secret)
    if group is None:
        return found[0]
    start, end = found.start(group) - found.start(), found.end(group) - found.start()
    return f"{found[0][:start]}{MASK}{found[0][end:]}"
