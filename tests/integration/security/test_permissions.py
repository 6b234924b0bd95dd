"""What each service is allowed, written out by hand here, and that a real server refuses it everything else."""

from collections.abc import Iterator

import anyio
import nats
import pytest
from integration.security.secured import Secured

from lachesis.pipeline.bus.connection import _tls
from lachesis.schemas.access import OBSERVER, OPERATOR
from lachesis.schemas.subjects import BUCKETS, STREAMS
from lachesis.services.registry import SERVICES

IDENTITIES = [*SERVICES, OPERATOR, OBSERVER]
STORES = [*STREAMS, *(f"KV_{bucket}" for bucket in BUCKETS.values())]

EVENTS = {
    kind: f"rl.{kind}.one.live.words" for kind in ("score", "reward", "curriculum", "teacher", "dead", "eval", "alert")
}
STATES = {
    stage: f"rl.state.one.{stage}.live.{partition}"
    for stage, partition in (
        ("governor", "0"), ("normalizer", "words"), ("curriculum", "words"), ("health", "words"), ("trainer", "main"),
        ("batcher", "0"),
    )
}  # fmt: skip
OTHERS = {
    "rollout": "rl.rollout.one.words",
    "rollout chunk": "rl.blob.rollout.one.abc",
    "promotions": "rl.promotion.one.live",
    "logprobs": "rl.logprobs.one.live.words",
    "logprobs chunk": "rl.blob.logprobs.one.abc",
    "ledger": "rl.ledger.one.main",
    "ledger of another trainer": "rl.ledger.one.other",
    "lease": "rl.lease.one",
    "incident": "rl.incident.one",
    "replay": "rl.replay.rescore.one.again.words",
    "revision": "rl.replay.revision.one.again.all",
    "replay state": "rl.state.one.replay.again.words",
    "shadow": "rl.shadow.one.again",
    "trainer on the past": "rl.state.one.past.live.again",
    "state of another trainer": "rl.state.one.trainer.live.again",
}
KEYS = {
    "policy": "$KV.lachesis_policy.one",
    "curriculum": "$KV.lachesis_curriculum.one.live.words",
    "inference": "$KV.lachesis_inference.one.policy",
    "scorer's attempts": "$KV.lachesis_attempts.scorer=one=live.7",
    "teacher's attempts": "$KV.lachesis_attempts.teacher=one=live.7",
    "runs": "$KV.lachesis_runs.one",
    "retention": "$KV.lachesis_retention.one",
    "reservations": "$KV.lachesis_retention.reservations=",
    "resume": "$KV.lachesis_resume.one.words",
    "gateway": "$KV.lachesis_gateway.one.registry",
}
SUBJECTS = {**EVENTS, **{f"{stage} state": state for stage, state in STATES.items()}, **OTHERS, **KEYS}

WRITES = {
    "governor": {"governor state", "rollout chunk", "logprobs chunk", "retention", "reservations"},
    "batcher": {"ledger", "dead", "promotions"},
    "normalizer": {"reward", "normalizer state", "dead"},
    "curriculum": {"curriculum", "curriculum state", "dead", "$KV curriculum"},
    "health": {"alert", "health state"},
    "scorer": {"score", "dead", "scorer's attempts", "incident"},
    "teacher": {"teacher", "logprobs", "logprobs chunk", "dead", "teacher's attempts", "incident"},
    "inference": {"inference"},
    "trainer": {"trainer state", "policy"},
    "evaluator": {"eval"},
    "environment": {"rollout", "rollout chunk", "lease"},
    "gateway": {"rollout", "rollout chunk", "lease", "gateway"},
    # to put dead letters back, to let environments go on, to replay history, which it holds meanwhile, to follow it,
    # and to train on it
    OPERATOR: {
        "rollout",
        "rollout chunk",
        "lease",
        "score",
        "teacher",
        "eval",
        "resume",
        "replay",
        "revision",
        "replay state",
        "ledger of another trainer",
        "state of another trainer",
        "trainer on the past",
        "retention",
        "shadow",
        "promotions",
    },
    OBSERVER: set(),
}
"""By identity, what it may publish of SUBJECTS."""

READS = {
    "governor": {"ROLLOUTS", "EVENTS", "REPLAY", "TEACHER", "LEDGER", "policy"},
    "batcher": {"ROLLOUTS", "EVENTS", "LEDGER"},
    "normalizer": {"ROLLOUTS", "EVENTS", "LEDGER"},
    "curriculum": {"EVENTS", "LEDGER"},
    "health": {"EVENTS", "LEDGER", "resume"},
    "scorer": {"ROLLOUTS"},
    "teacher": {"inference"},
    "inference": {"policy", "inference"},
    "trainer": {"EVENTS", "LEDGER", "policy"},
    "evaluator": {"policy", "inference"},
    "environment": {"policy", "curriculum", "inference"},
    "gateway": {"policy"},
    OPERATOR: {*STREAMS, *BUCKETS},
    OBSERVER: {*STREAMS, *BUCKETS},
}
"""By identity, what it may make readers of; it may also fetch from them."""

FETCHES = {
    "governor": {"retention"},
    "batcher": {"policy"},
    "health": {"retention"},
    "scorer": {"attempts", "policy"},
    "teacher": {"ROLLOUTS", "attempts"},
    "trainer": {"ROLLOUTS", "TEACHER"},
    "evaluator": {"EVENTS"},
    "gateway": {"gateway"},
}
"""By identity, what it may fetch from without making readers; it may ask whether what it does not find is counted."""

UNDER_RL = (
    "rl.lease.one", "rl.heartbeat.one.governor.*", "rl.heartbeat.one.health.*", "rl.score.one.live.words",
    "rl.rollout.two.words", "rl.incident.one",
)  # fmt: skip
HEARS = {
    "governor": {"rl.lease.one"},
    "batcher": {"rl.heartbeat.one.governor.*", "rl.incident.one"},
    "gateway": {"rl.heartbeat.one.governor.*"},
    "trainer": {"rl.heartbeat.one.governor.*", "rl.heartbeat.one.health.*", "rl.incident.one"},
    OPERATOR: {"rl.>", *UNDER_RL},
    OBSERVER: {"rl.>", *UNDER_RL},
}
"""By identity, what it may subscribe to. Under `rl.>` nothing of another run is heard: that has its own account."""

STREAM_ACTIONS = (
    "STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.INFO", "STREAM.MSG.GET",
    "STREAM.MSG.DELETE", "STREAM.SNAPSHOT", "STREAM.RESTORE", "STREAM.LEADER.STEPDOWN", "STREAM.PEER.REMOVE",
    "DIRECT.GET", "CONSUMER.NAMES", "CONSUMER.LIST", "CONSUMER.CREATE",
)  # fmt: skip
CONSUMER_ACTIONS = (
    "CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE", "CONSUMER.DELETE", "CONSUMER.INFO", "CONSUMER.MSG.NEXT",
    "CONSUMER.PAUSE", "CONSUMER.RESET", "CONSUMER.UNPIN", "CONSUMER.LEADER.STEPDOWN",
)  # fmt: skip
LAST = "last.of.all"
"""What nobody may publish on, so that its refusal is the last one."""
CONSUMERS = ("batcher=one=EVENTS=score=0123456789abcdef", "scorer=one=live", "teacher=one=live")


PARTS = tuple(
    f"rl.heartbeat.one.{part}.7-abc"
    for part in ("environment-words", "environment-held", "environment-other", "inference-policy", "shadow-again")
)


def every_publication() -> Iterator[str]:
    """Everything worth trying, on the run's own subjects and on those of another run."""
    yield from SUBJECTS.values()
    yield from (subject.replace("one", "two") for subject in SUBJECTS.values())
    for service in IDENTITIES:
        yield f"rl.heartbeat.one.{service}.7-abc"
        yield f"_INBOX_{service}.abc.1"
    yield from PARTS
    yield from ("_INBOX.abc.1", "$SYS.REQ.SERVER.PING", "$SYS.ACCOUNT.x.CONNECT", "$SRV.PING", "rl.health.one.scorer")
    yield from ("$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$JS.API.ACCOUNT.PURGE.x", "else")
    for store in STORES:
        yield from (f"$JS.API.{action}.{store}" for action in STREAM_ACTIONS)
        for consumer in CONSUMERS:
            yield from (f"$JS.API.{action}.{store}.{consumer}" for action in CONSUMER_ACTIONS)
            yield f"$JS.API.CONSUMER.CREATE.{store}.{consumer}.rl.score.one.live.words"
            yield f"$JS.ACK.{store}.{consumer}.1.2.3.4.5"


def allowed_publications(identity: str) -> set[str]:
    """What `identity` may publish of `every_publication`, from the tables above."""
    person = identity in (OPERATOR, OBSERVER)
    found = {KEYS["curriculum"] if name == "$KV curriculum" else SUBJECTS[name] for name in WRITES[identity]}
    found.add("$JS.API.INFO")
    if person:
        found |= {"$SRV.PING", "rl.health.one.scorer"}
    else:
        found |= {f"_INBOX_{OPERATOR}.abc.1", f"_INBOX_{OBSERVER}.abc.1"}
        found.add("$JS.API.STREAM.INFO.ROLLOUTS")  # the server's clock
        parts = {"environment": ("-words", "-held"), "inference": ("-policy",)}.get(identity, ())
        found |= {f"rl.heartbeat.one.{identity}{part}.7-abc" for part in ("", *parts)}
    for store in map(stored_as, READS[identity]):
        found |= {f"$JS.API.{action}.{store}" for action in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")}
        own = CONSUMERS[:1] if store == "ROLLOUTS" else CONSUMERS  # the durables are on ROLLOUTS alone
        found |= {f"$JS.API.{a}.{store}.{c}" for c in own for a in ("CONSUMER.CREATE", "CONSUMER.MSG.NEXT")}
    for store in map(stored_as, FETCHES.get(identity, ())):
        found |= {f"$JS.API.{action}.{store}" for action in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")}
    if identity in ("scorer", "teacher"):
        actions = ("CONSUMER.CREATE", "CONSUMER.MSG.NEXT", "CONSUMER.INFO")
        found |= {f"$JS.API.{action}.ROLLOUTS.{identity}=one=live" for action in actions}
        found.add(f"$JS.ACK.ROLLOUTS.{identity}=one=live.1.2.3.4.5")
        found.add("$JS.API.STREAM.PURGE.KV_lachesis_attempts")  # deleting a key is purging its subject
    if identity == "governor":
        found |= {f"$JS.API.STREAM.PURGE.{store}" for store in STREAMS} | {
            f"_INBOX_{asker}.abc.1" for asker in ("environment", "gateway")
        }
    if person or identity == "governor":
        found |= {f"$JS.API.CONSUMER.INFO.ROLLOUTS.{stage}=one=live" for stage in ("scorer", "teacher")}
    if identity == OPERATOR:  # shadows are its own: their heartbeats, the answers of one told to end, what they drop
        found |= {*PARTS, *(f"rl.heartbeat.one.{service}.7-abc" for service in IDENTITIES)}
        found |= {f"_INBOX_{OPERATOR}.abc.1"}
        found |= {f"$JS.API.STREAM.PURGE.{store}" for store in STORES}  # gc
        found |= {f"$JS.API.CONSUMER.DELETE.ROLLOUTS.{stage}=one=live" for stage in ("scorer", "teacher")}
        found |= {f"$JS.API.STREAM.{action}.{store}" for store in STORES for action in ("CREATE", "UPDATE")}
    return found


def stored_as(name: str) -> str:
    return f"KV_{BUCKETS[name]}" if name in BUCKETS else name


def every_subscription() -> Iterator[str]:
    yield from (">", "*.>", "rl.>", *UNDER_RL)
    yield from ("_INBOX.>", "$KV.>", "$JS.>", "$JS.API.>", "$JS.EVENT.>", "$SYS.>", "$SRV.>")
    for identity in IDENTITIES:
        yield f"_INBOX_{identity}.>"
        yield f"$SRV.PING.lachesis-{identity}"
        yield f"rl.health.one.{identity}"


def allowed_subscriptions(identity: str) -> set[str]:
    found = {f"_INBOX_{identity}.>", *HEARS.get(identity, ())}
    if identity in (OPERATOR, OBSERVER):
        return found | {f"rl.health.one.{service}" for service in IDENTITIES}
    return found | {f"$SRV.PING.lachesis-{identity}", f"rl.health.one.{identity}"}


async def refused(server: Secured, identity: str, publications: list[str], subscriptions: list[str]) -> set[str]:
    """Return what the server refuses `identity` of these, as it says it: in lower case."""
    said: list[str] = []
    all_said = anyio.Event()

    async def on_error(error: Exception) -> None:
        if LAST in str(error):
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
        for subject in publications:
            await client.publish(subject, b"", reply=client.new_inbox())
        for subject in subscriptions:
            await client.subscribe(subject, cb=on_message)
        await client.publish(LAST, b"")  # not `flush`, whose ping goes before what the client has not sent yet
        with anyio.fail_after(30):
            await all_said.wait()
    finally:
        await client.close()
    assert all("permissions violation for " in text for text in said), said
    return {text.partition("permissions violation for ")[2] for text in said}


@pytest.mark.parametrize("identity", IDENTITIES)
async def test_it_is_allowed_its_work_and_refused_all_else(secured: Secured, identity: str) -> None:
    publications, subscriptions = list(dict.fromkeys(every_publication())), list(every_subscription())
    may_publish, may_subscribe = allowed_publications(identity), allowed_subscriptions(identity)
    assert may_publish <= set(publications)
    assert may_subscribe <= set(subscriptions)
    expected = {f'publish to "{subject.lower()}"' for subject in publications if subject not in may_publish}
    expected |= {f'subscription to "{subject.lower()}"' for subject in subscriptions if subject not in may_subscribe}
    found = await refused(secured, identity, publications, subscriptions)
    assert sorted(found - expected) == [], "refused, though its work needs it"
    assert sorted(expected - found) == [], "allowed, though its work does not need it"
    assert len(expected) > 450


async def test_no_service_lacks_a_row() -> None:
    assert set(WRITES) == set(READS) == set(IDENTITIES)
