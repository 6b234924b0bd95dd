"""Everything worth trying with a key, and what the server refuses of it; written down as a table for people."""

import re
from collections.abc import Iterable, Iterator, Mapping

import anyio
import nats
from integration.security.secured import Secured

from lachesis.pipeline.access import OBSERVER, OPERATOR
from lachesis.pipeline.bus.connection import _tls
from lachesis.schemas.keys import INFERENCE_ROLES
from lachesis.schemas.subjects import BUCKET, STREAMS, stream_name
from lachesis.services.registry import services

__all__ = ["IDENTITIES", "OTHER", "OWN", "STORES", "allowed", "as_table", "publications", "subscriptions"]

ENVIRONMENTS = ("environment-words", "environment-far")
IDENTITIES = [*(name for name in services() if name != "environment"), *ENVIRONMENTS, OPERATOR, OBSERVER]
STORES = [stream_name("one", kind) for kind in (*STREAMS, BUCKET)]
OWN = "<own name>"
"""Stands for a name of consumers, or a prefix of inboxes, that belongs to the one that tries it."""
OTHER = "<another's name>"

_KINDS = ("score", "reward", "curriculum", "teacher", "dead", "eval", "alert")
_EVENTS = tuple(f"rl.{kind}.one.live.{env}" for kind in _KINDS for env in ("words", "far"))
_STATES = tuple(
    f"rl.state.one.{stage}.live.{partition}"
    for stage, partition in (
        ("governor", "0"), ("normalizer", "words"), ("curriculum", "words"), ("health", "words"), ("trainer", "main"),
        ("batcher", "0"), ("past", "again"), ("trainer", "again"), ("marks", "0"), ("recovery", "0"),
    )
)  # fmt: skip
_OTHERS = (
    "rl.rollout.one.words", "rl.rollout.one.far", "rl.rollout.one.unknown", "rl.blob.rollout.one.abc",
    "rl.blob.rollout.one.words.abc", "rl.blob.rollout.one.far.abc", "rl.blob.rollout.one.*", "rl.blob.rollout.one.*.*",
    "rl.promotion.one.live", "rl.logprobs.one.live.words", "rl.blob.logprobs.one.words.abc", "rl.ledger.one.main",
    "rl.ledger.one.again", "rl.lease.one.words", "rl.lease.one.far", "rl.lease.one", "rl.incident.one",
    "rl.replay.rescore.one.again.words", "rl.replay.revision.one.again.all", "rl.state.one.replay.again.words",
    "rl.admission.one", "rl.shadow.one.again", "rl.health.one.supervisor", "rl.weights.one.head",
    "rl.weights.one.chunk", "rl.blob.rollout.one.lost.recovery", "rl.blob.logprobs.one.lost.recovery",
    "rl.call.one.words", "rl.call.one.far", "rl.takeup.one.words", "rl.takeup.one.far",
    "rl.alert.one.recovery.lost", "rl.replay.rescore.one.recovery.lost",
)  # fmt: skip
_KEYS = tuple(
    f"$KV.lachesis_one.{key}"
    for key in (
        "policy", "curriculum.live.words", "curriculum.live.far", "fixed_samples.live.words", "epoch.words",
        "epoch.far", "held_out.words", "held_out.far", "prompts.words", "prompts.far", "inference.policy",
        "inference.teacher", "inference.eval", "webhook.live",
        "attempts.scorer=one=live.7", "attempts.teacher=one=live.7", "supervisor", "store", "marks", "retention",
        "resume.words", "gateway.registry",
    )
)  # fmt: skip
_SUBJECTS = (*_EVENTS, *_STATES, *_OTHERS, *_KEYS)
_ROLES = tuple(f"inference-{role}" for role in INFERENCE_ROLES)
_SPEAKERS = (*IDENTITIES, *_ROLES, "shadow-again", "environment-other", "web", "mcp")
_STREAM_CALLS = (
    "STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.INFO", "STREAM.MSG.GET",
    "STREAM.MSG.DELETE", "STREAM.SNAPSHOT", "STREAM.RESTORE", "STREAM.LEADER.STEPDOWN", "STREAM.PEER.REMOVE",
    "DIRECT.GET", "CONSUMER.NAMES", "CONSUMER.LIST", "CONSUMER.CREATE",
)  # fmt: skip
_CONSUMER_CALLS = (
    "CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE", "CONSUMER.DELETE", "CONSUMER.INFO", "CONSUMER.MSG.NEXT",
    "CONSUMER.PAUSE", "CONSUMER.RESET", "CONSUMER.UNPIN", "CONSUMER.LEADER.STEPDOWN",
)  # fmt: skip
_SERVER_CALLS = (
    "$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$JS.API.ACCOUNT.PURGE.x",
    "$JS.API.ACCOUNT.STREAM.MOVE.x.lachesis_one_LEDGER", "$JS.API.ACCOUNT.STREAM.CANCEL_MOVE.x.lachesis_one_LEDGER",
    "$JS.API.META.LEADER.STEPDOWN", "$JS.API.SERVER.REMOVE", "$JS.API.STREAM.CREATE.lachesis_one_MORE",
    "$JS.API.STREAM.RESTORE.lachesis_one_MORE", "$JS.SNAPSHOT.RESTORE.lachesis_one_LEDGER.abc",
    "$JS.SNAPSHOT.ACK.lachesis_one_LEDGER.abc", "$JS.FC.lachesis_one_LEDGER.batcher=0.abc", "$JS.EVENT.ADVISORY.x",
    "$JSC.R.abc", "$NRG.AE.abc",
)  # fmt: skip
_DURABLES = ("scorer=one=live", "teacher=one=live")
_VERBS = ("PING", "INFO", "STATS")
_LAST = "last.of.all"
"""What no identity may publish on, so that its refusal is the last one."""


def publications() -> Iterator[str]:
    """Everything worth trying to publish, on the run's own subjects and on those of another run."""
    yield from _SUBJECTS
    yield from (subject.replace("one", "two") for subject in _SUBJECTS)
    for name in _SPEAKERS:
        yield from (f"rl.heartbeat.one.{name}.7-abc", f"rl.health.one.{name}", f"_INBOX_{name}.abc.1")
    yield from ("_INBOX.abc.1", "_R_.abc.def", "$SYS.REQ.SERVER.PING", "$SYS.ACCOUNT.x.CONNECT", "$SRV.PING", "else")
    yield from _SERVER_CALLS
    yield from ("rl.kv.one.policy", "rl.kv.two.policy")
    names = (*_DURABLES, *(f"{name}=0" for name in IDENTITIES), "batcher=one=EVENTS=score=0123456789abcdef")
    for store in STORES:
        yield from (f"$JS.API.{call}.{store}" for call in _STREAM_CALLS)
        for tail in ("abc", "words.abc", "far.abc", "*", "*.*", ">"):  # a wildcard asks for the last of all it covers
            yield f"$JS.API.DIRECT.GET.{store}.rl.blob.rollout.one.{tail}"
            yield f"$JS.API.DIRECT.GET.{store}.rl.blob.logprobs.one.{tail}"
        for subject in ("rl.rollout.one.words", "rl.weights.one.head", "$KV.lachesis_one.policy", "$KV.lachesis_one.>"):
            yield f"$JS.API.DIRECT.GET.{store}.{subject}"
        if store == stream_name("one", BUCKET):
            yield from (f"$JS.API.DIRECT.GET.{store}.{key}" for key in (*_KEYS, "$KV.lachesis_one.gateway.*", ">"))
        for name in names:
            yield from (f"$JS.API.{call}.{store}.{name}" for call in _CONSUMER_CALLS)
            yield f"$JS.API.CONSUMER.CREATE.{store}.{name}.rl.score.one.live.words"
            yield f"$JS.ACK.{store}.{name}.1.2.3.4.5"
            yield f"$JS.ACK.domain.account.{store}.{name}.1.2.3.4.5"


def subscriptions() -> Iterator[str]:
    """Everything worth trying to subscribe to."""
    yield from (">", "*.>", "rl.>", "_INBOX.>", "_R_.>", "$KV.>", "$JS.>", "$JS.API.>", "$JS.EVENT.>", "$SYS.>")
    yield from ("$SRV.>", "rl.heartbeat.one.*.*", "rl.score.one.live.words")
    yield from (f"rl.heartbeat.one.{name}.*" for name in IDENTITIES)
    yield from (
        "rl.rollout.one.words",
        "rl.rollout.two.words",
        "rl.incident.one",
        "rl.admission.one",
        "rl.shadow.one.again",
    )
    yield from ("rl.takeup.one.words", "rl.takeup.one.far", "rl.call.one.words")
    yield from ("rl.lease.one.words", "rl.lease.one.far", "rl.health.one.supervisor", "rl.kv.>")
    yield from ("rl.kv.one.>", "rl.kv.two.>", "rl.kv.two.policy")
    yield from (f"rl.kv.one.{key.removeprefix('$KV.lachesis_one.')}" for key in _KEYS)
    yield from (f"$SRV.{verb}" for verb in _VERBS)
    for name in (*IDENTITIES, *_ROLES, "environment"):
        yield from (f"_INBOX_{name}.>", f"rl.health.one.{name}")
        yield from (f"$SRV.{verb}.lachesis-{name}{end}" for verb in _VERBS for end in ("", ".*"))


async def allowed(server: Secured, identity: str) -> tuple[set[str], set[str]]:
    """Return what the server lets `identity` publish and subscribe to, of all that is tried."""
    publish, subscribe = list(dict.fromkeys(publications())), list(dict.fromkeys(subscriptions()))
    refused = await _refused(server, identity, publish, subscribe)
    assert len(refused) > 1000, "hardly anything is refused"
    return (
        {subject for subject in publish if f'publish to "{subject.lower()}"' not in refused},
        {subject for subject in subscribe if f'subscription to "{subject.lower()}"' not in refused},
    )


async def _refused(server: Secured, identity: str, publish: list[str], subscribe: list[str]) -> set[str]:
    """Return what the server refuses `identity` of these, as it says it: in lower case."""
    said: list[str] = []
    all_said = anyio.Event()

    async def on_error(error: Exception) -> None:
        if _LAST in str(error):
            all_said.set()
        if not all_said.is_set():  # what comes later is of the connection's end
            said.append(str(error))

    async def on_message(_: object) -> None:
        pass

    config = server.connection(identity)
    client = await nats.connect(
        server.address,
        tls=_tls(config),
        nkeys_seed=config.nkey_file,
        inbox_prefix=config.inbox_prefix,
        error_cb=on_error,
        allow_reconnect=False,
        connect_timeout=30,
    )
    try:
        for subject in publish:
            await client.publish(subject, b"", reply=client.new_inbox())
        for subject in subscribe:
            await client.subscribe(subject, cb=on_message)
        await client.publish(_LAST, b"")  # not `flush`, whose ping goes before what the client has not sent yet
        with anyio.fail_after(60):
            await all_said.wait()
    finally:
        await client.close()
    assert all("permissions violation for " in text for text in said), said
    return {text.partition("permissions violation for ")[2] for text in said}


def as_table(may: Mapping[str, tuple[set[str], set[str]]]) -> str:
    """Return the table for people. What no identity may do is counted, not listed."""
    lines = [_TITLE]
    for verb, which, tried in (("publish", 0, publications()), ("subscribe to", 1, subscriptions())):
        rows: dict[str, set[str]] = {}
        subjects = list(dict.fromkeys(tried))
        for subject in subjects:
            for identity in IDENTITIES:
                if subject in may[identity][which]:
                    rows.setdefault(_with_own(subject, identity), set()).add(identity)
        lines += [f"\n## What each may {verb}", *_rows(rows)]
        nobody = [subject for subject in subjects if not any(subject in may[name][which] for name in IDENTITIES)]
        lines.append(f"\nOf {len(subjects)} subjects tried, nobody may {verb} {len(nobody)}.")
    return "\n".join(lines) + "\n"


def _rows(rows: Mapping[str, Iterable[str]]) -> Iterator[str]:
    columns = [name for name in IDENTITIES if name not in (OPERATOR, OBSERVER)] + [OPERATOR, OBSERVER]
    yield f"| subject | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for subject, who in rows.items():
        yield f"| `{subject}` | {' | '.join('x' if name in who else ' ' for name in columns)} |"


def _with_own(subject: str, identity: str) -> str:
    subject = subject.replace(f".{identity}=0", f".{OWN}").replace(f"_INBOX_{identity}.", f"_INBOX_{OWN}.")
    return re.sub(r"\.[a-z-]+=0\b|\.batcher=one=EVENTS=.*", f".{OTHER}", subject)


_TITLE = """# Who may do what on the server

Written by `WRITE_PERMISSIONS=1 pytest tests/integration/security/test_permissions.py`, which tries each subject
with each key on a real nats-server; without the variable it compares. Do not edit. The run is called `one`, its
environments `words` and `far`; groups of `far` arrive at the gateway. Every x is what the server lets pass; each
identity is in an account of its own, so an answer never reaches a subject of another one, whatever its asker names."""
