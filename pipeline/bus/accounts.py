"""A run's accounts as nats-server takes them: one that holds the streams, and one for each identity.

Pure.

The server checks where a client publishes, but not where it asks for the answer. With all identities in one account, a
client could name a foreign subject for it, and the server itself would store its answer there, or take it as a request
to delete a stream. Therefore no client is in the account that holds the streams. Each identity's own account imports
from it what the identity may do. The server sends an answer back to the account of the request, where nothing is
stored. Broadcasts go from the sender's account to the listeners' accounts, since the server passes nothing on twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from lachesis.pipeline.access import OBSERVER, OPERATOR, Access
from lachesis.pipeline.bus.consumer_names import reader_names
from lachesis.pipeline.bus.domains import in_domain
from lachesis.pipeline.bus.permissions import ANSWERS, API, Permissions, inbox_prefix, permissions
from lachesis.pipeline.bus.routing import matches
from lachesis.schemas.subjects import key_change, stream_name

__all__ = ["Account", "accounts_config", "accounts_of", "streams_account"]

_SEVERAL_ANSWERS = (f"{API}.DIRECT.GET.", f"{API}.CONSUMER.MSG.NEXT.", "$SRV.")
_RESPONSE_TTL = {f"{API}.DIRECT.GET.": "10s"}
"""How long the server expects further answers; it remembers each question for so long, two minutes by default."""


@dataclass(slots=True)
class Account:
    """What an account offers to others and takes from them, as (account, subject); without `user` it has no clients."""

    name: str
    user: tuple[str, str, Permissions] | None = None
    """Identity, public nkey, permissions."""
    serves: list[str] = field(default_factory=list)
    tells: list[str] = field(default_factory=list)
    asks: list[tuple[str, str]] = field(default_factory=list)
    hears: list[tuple[str, str]] = field(default_factory=list)


def streams_account(run: str) -> str:
    """Return the name of the account that holds the streams of a run."""
    return f"lachesis-{run}"


def accounts_of(run: str, table: Mapping[str, Access], keys: Mapping[str, str]) -> list[Account]:
    """Return the accounts of a run; `keys` are the identities' public nkeys."""
    streams = Account(streams_account(run))
    found = {identity: Account(f"{streams.name}/{identity}") for identity in table}
    for identity, access in table.items():
        account, allowed = found[identity], permissions(run, identity, access)
        account.user = (identity, keys[identity], allowed)
        requested = [(other, subject) for other, subject in access.asks if other != identity]
        for other, subject in requested:
            account.asks.append((found[other].name, subject))
            found[other].serves.append(subject)
        account.tells += access.tells
        for other, heard in table.items():
            # what it says itself it hears anyway, and no service listens to people: imports must not form a cycle
            if other != identity and (other != OPERATOR or identity == OBSERVER):
                readable = [
                    subject for subject in heard.tells if any(matches(hears, subject) for hears in access.hears)
                ]
                account.hears += [(found[other].name, subject) for subject in readable]
        local = {*(subject for _, subject in access.asks), *access.tells, ANSWERS, f"{inbox_prefix(identity)}.>"}
        for subject in _without_names(run, identity, allowed.publish, access):
            if subject not in local:
                account.asks.append((streams.name, subject))
                streams.serves.append(subject)
        for key in access.watches:
            subject = key_change(run, key)
            account.hears.append((streams.name, subject))
            streams.tells.append(subject)
    return [streams, *found.values()]


def _without_names(run: str, identity: str, publish: list[str], access: Access) -> list[str]:
    """Return `publish` with one subject for those that differ in a reader's name: permissions distinguish them."""
    names = {
        f"{API}.CONSUMER.{verb}.{stream_name(run, kind)}.{name}": f"{API}.CONSUMER.{verb}.{stream_name(run, kind)}.*"
        for kind in access.reads
        for name in reader_names(identity)
        for verb in ("CREATE", "MSG.NEXT")
    }
    collapsed = dict.fromkeys(names.get(subject, subject) for subject in publish)
    covered = [f"{API}.CONSUMER.{verb}.{stream_name(run, kind)}.{durable}" for kind, durable in access.consumes
               for verb in ("CREATE", "MSG.NEXT")]  # fmt: skip
    wider = {subject.rpartition(".")[0] + ".*" for subject in covered} & collapsed.keys()
    return [subject for subject in collapsed if not (subject in covered and f"{subject.rpartition('.')[0]}.*" in wider)]


def accounts_config(accounts: list[Account], domain: str | None = None) -> str:
    """Return the accounts in nats-server's form.

    With a `domain` the streams are in an account of another server, to which a leaf node joins the one without a user.
    """
    return "\n".join(line for account in accounts for line in [*_account(account, domain), ""])


def _account(account: Account, domain: str | None) -> list[str]:
    lines = [f"{_quoted(account.name)} {{"]
    if account.user is None:
        lines += ["  jetstream: enabled"] if domain is None else []
    else:
        identity, key, allowed = account.user
        allowed = allowed.in_domain(domain)
        lines += [
            "  users: [",
            f"    {{  # {identity}",
            f"      nkey: {key}",
            "      permissions: {",
            f"        publish: {{ allow: {_list(allowed.publish)}, deny: {_list(allowed.deny_publish)} }}",
            f"        subscribe: {{ allow: {_list(allowed.subscribe)} }}",
            "      }",
            "    }",
            "  ]",
        ]
    exports = [_service(subject, domain) for subject in dict.fromkeys(account.serves)]
    exports += [f"    {{ stream: {_quoted(subject)} }}" for subject in dict.fromkeys(account.tells)]
    imports = [
        f"    {{ {kind}: {{ account: {_quoted(other)}, subject: {_quoted(in_domain(subject, domain))} }} }}"
        for kind, taken in (("service", account.asks), ("stream", account.hears))
        for other, subject in dict.fromkeys(taken)
    ]
    for name, entries in (("exports", exports), ("imports", imports)):
        if entries:
            lines += [f"  {name}: [", *entries, "  ]"]
    return [*lines, "}"]


def _service(subject: str, domain: str | None) -> str:
    several = subject.startswith(_SEVERAL_ANSWERS)
    after = next((after for start, after in _RESPONSE_TTL.items() if subject.startswith(start)), None)
    threshold = f', response_threshold: "{after}"' if after else ""
    shown = _quoted(in_domain(subject, domain))
    return f"    {{ service: {shown}, response_type: {'stream' if several else 'singleton'}{threshold} }}"


def _list(subjects: list[str]) -> str:
    return "[" + ", ".join(map(_quoted, subjects)) + "]"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
