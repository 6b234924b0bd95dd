"""No key makes the server itself write where that key may not: by replies, consumers or traces."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import anyio
import pytest
from integration.security.probes import IDENTITIES, STORES, publications
from integration.security.secured import Secured
from nats.aio.msg import Msg

from lachesis.pipeline.access import OPERATOR, Scope
from lachesis.pipeline.bus.accounts import accounts_of
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.consumer_names import reader_names
from lachesis.pipeline.bus.routing import matches
from lachesis.pipeline.extension import access_of
from lachesis.schemas import keys, subjects
from lachesis.schemas.subjects import BUCKET, LEDGER, ROLLOUTS, STREAMS, stream_name

TABLE = access_of(Scope(run="one", revision="live", trainer="main", environments=("words", "far"), foreign=("far",)))
FORGED = (
    "rl.rollout.one.forged", "rl.reward.one.live.forged", "rl.score.one.live.forged", "rl.ledger.one.forged",
    "rl.state.one.trainer.live.forged", "$KV.lachesis_one.forged", "$KV.lachesis_one.inference.forged",
)  # fmt: skip
"""Subjects that streams store, and that no identity may use but where a wildcard allows it."""
CALLS = (
    "$JS.API.STREAM.PURGE.lachesis_one_LEDGER",
    "$JS.API.STREAM.DELETE.lachesis_one_LEDGER",
    "$JS.ACK.lachesis_one_ROLLOUTS.scorer=one=live.1.1.1.1.0",
)
CHOSEN = b"{}"
"""What is stored to be sent elsewhere: bytes that a request to delete a stream may consist of."""


@pytest.fixture(scope="module")
async def secured(make_secured: Callable[[], AbstractAsyncContextManager[Secured]]) -> AsyncIterator[Secured]:
    """A server of this module's own: each key stores on its own subjects what no service would."""
    async with make_secured() as server:
        async with await server.bus(OPERATOR) as operator:
            before = await stored(operator, "forged")
            await operator.publish(FORGED[2], CHOSEN, msg_id="forged by the operator")
            assert await stored(operator, "forged") == before + 1, "what is forged would be seen"
        yield server


async def stored(bus: object, pattern: str) -> int:
    """Return how many messages of all streams lie on subjects that hold `pattern`."""
    found = 0
    for store in STORES:
        answer = await bus.client.request(  # type: ignore[attr-defined]
            f"$JS.API.STREAM.INFO.{store}", json.dumps({"subjects_filter": ">"}).encode(), timeout=30
        )
        counted = json.loads(answer.data)["state"].get("subjects") or {}
        found += sum(n for subject, n in counted.items() if pattern in subject)
    return found


def own_writes(identity: str) -> list[str]:
    """Return subjects that the identity may store its chosen bytes on."""
    access = TABLE[identity]
    patterns = [*access.writes, *(subjects.value_subject("one", key) for key in access.sets)]
    return [subject for subject in publications() if any(matches(pattern, subject) for pattern in patterns)]


@pytest.mark.parametrize("identity", [name for name in IDENTITIES if name != OPERATOR])
async def test_no_answer_is_stored_or_obeyed_where_its_asker_names_it(secured: Secured, identity: str) -> None:
    may = [subject for subject in publications() if "_INBOX" not in subject and "PURGE" not in subject]
    own_calls = {
        f"$JS.API.STREAM.PURGE.{stream_name('one', kind)}" for kind in TABLE[identity].trims
    }  # an answer may ask for no more
    calls = [call for call in CALLS[:2] if call not in own_calls]
    bodies = [b"", b'{"seq":1}', *(json.dumps({"last_by_subj": subject}).encode() for subject in own_writes(identity))]
    async with await secured.bus(OPERATOR) as operator:
        await operator.publish(subjects.ledger("one", "kept"), b"1", msg_id=f"kept {identity} 1")
        before = (await operator.usage(LEDGER)).first
        forged = await stored(operator, "forged")
        async with secured.client(identity) as client:
            for subject in own_writes(identity):
                await client.publish(subject, CHOSEN)
            gets = [subject for subject in may if ".GET." in subject or ".INFO" in subject]
            for subject in gets:
                for body in bodies:
                    for reply in FORGED:
                        await client.publish(subject, body, reply=reply)
                    await client.publish(subject, body, headers={"Nats-Trace-Dest": FORGED[3]})
            for subject in may:
                for reply in (FORGED[3], *calls):
                    if "STEPDOWN" not in subject and not subject.startswith("$JS.ACK"):
                        await client.publish(subject, CHOSEN if "GET" not in subject else bodies[-1], reply=reply)
            with anyio.fail_after(120):
                await client.request("$JS.API.INFO", timeout=60)
        assert await stored(operator, "forged") == forged
        if LEDGER not in TABLE[identity].trims:  # it may delete the ledger's beginning and needs no forged call for it
            assert (await operator.usage(LEDGER)).first == before
            assert await operator.last(LEDGER, subjects.ledger("one", "kept")) is not None


@pytest.mark.parametrize("identity", [name for name in IDENTITIES if TABLE[name].reads])
async def test_no_consumer_pushes_what_is_stored_to_a_subject_of_its_makers_choice(
    secured: Secured, identity: str
) -> None:
    async with await secured.bus("environment-words") as environment:
        await environment.publish(subjects.rollout("one", "words"), CHOSEN, msg_id=f"pushed {identity}")
    kind = TABLE[identity].reads[0]
    stream = stream_name("one", kind)
    async with await secured.bus(OPERATOR) as operator, secured.client(identity) as client:
        forged = await stored(operator, "forged")
        for name, reply in zip(reader_names(identity), (*FORGED, *CALLS), strict=False):
            config = {"name": name, "deliver_subject": reply, "ack_policy": "none", "deliver_policy": "all"}
            body = json.dumps({"stream_name": stream, "config": config}).encode()
            await client.request(f"$JS.API.CONSUMER.CREATE.{stream}.{name}", body, timeout=30)
        pulls = reader_names(identity)[-1]
        config = {"name": pulls, "ack_policy": "none", "deliver_policy": "all"}
        body = json.dumps({"stream_name": stream, "config": config}).encode()
        await client.request(f"$JS.API.CONSUMER.CREATE.{stream}.{pulls}", body, timeout=30)
        for reply in (*FORGED, CALLS[0]):
            await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{pulls}", b'{"batch":100}', reply=reply)
        await client.request("$JS.API.INFO", timeout=30)
        assert await stored(operator, "forged") == forged
        for name in reader_names(identity)[:12]:
            await operator.forget(kind, name)
        await operator.forget(kind, pulls)


async def test_an_environment_makes_no_consumer_and_others_still_can(secured: Secured) -> None:
    async with await secured.bus(OPERATOR) as operator, secured.client("environment-words") as client:
        before = [(await operator.client.request(f"$JS.API.STREAM.INFO.{s}", timeout=30)).data for s in STORES]
        for store in STORES:
            for number in range(100):
                for name in (f"mine{number}", f"environment-words={number}", f"batcher={number}"):
                    body = json.dumps({"stream_name": store, "config": {"durable_name": name, "name": name}}).encode()
                    for call in ("CREATE", "DURABLE.CREATE"):
                        await client.publish(f"$JS.API.CONSUMER.{call}.{store}.{name}", body)
        await client.request("$JS.API.INFO", timeout=60)
        for store, told in zip(STORES, before, strict=True):
            now = (await operator.client.request(f"$JS.API.STREAM.INFO.{store}", timeout=30)).data
            counted = [json.loads(one)["state"]["consumer_count"] for one in (told, now)]
            assert counted[1] <= counted[0], store


async def test_who_uses_up_its_names_stops_nobody_else_and_the_operator_frees_them(secured: Secured) -> None:
    async with (
        await secured.bus(OPERATOR) as operator,
        await secured.bus("health", give_up_s=5.0) as health,
        await secured.bus("batcher") as batcher,
        secured.client("health") as client,
    ):
        own = reader_names("health")
        for name in [*(f"health={n}" for n in range(32, 64)), *own]:
            config = {"name": name, "durable_name": name, "ack_policy": "none"}
            subject = f"$JS.API.CONSUMER.CREATE.lachesis_one_EVENTS.{name}"
            body = json.dumps({"stream_name": "lachesis_one_EVENTS", "config": config}).encode()
            if name in own:
                await client.request(subject, body, timeout=30)
            else:
                await client.publish(subject, body)
        listed = await operator.client.request("$JS.API.CONSUMER.NAMES.lachesis_one_EVENTS", timeout=30)
        names = [name for name in json.loads(listed.data)["consumers"] if name.startswith("health=")]
        assert sorted(names) == sorted(reader_names("health"))
        async with batcher.read(subjects.EVENTS, []):
            pass
        async with health.read(subjects.EVENTS, []) as reader:
            with anyio.move_on_after(5):
                while health.stall is None or "the most it may have" not in health.stall.reason:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            assert health.stall is not None
            assert "the most it may have" in health.stall.reason
            for name in names:
                await operator.forget("EVENTS", name)
            with anyio.fail_after(30):
                while health.stall is not None:  # noqa: ASYNC110 - the pull makes it when it tries again
                    await anyio.sleep(0.05)
            assert reader is not None


def test_nobody_is_in_the_account_of_the_streams() -> None:
    streams, *others = accounts_of("one", TABLE, dict.fromkeys(TABLE, "U"))
    assert streams.user is None
    assert not streams.asks
    assert not streams.hears
    assert all(account.user for account in others)
    assert {ROLLOUTS, LEDGER} <= set(STREAMS)


async def test_an_environment_neither_sees_nor_holds_up_the_large_messages_of_another(secured: Secured) -> None:
    """The name of another's chunks would be enough to write between them, so that its message is never whole."""
    chunks = subjects.blob("rollout", "one", "words", "c" * 32)
    patterns = ("rl.blob.rollout.one.*", "rl.blob.rollout.one.*.*", "rl.blob.rollout.one.>", "rl.blob.>", chunks)
    async with await secured.bus("environment-words") as words, secured.client("environment-far") as far:
        await words.publish(chunks, b"the other's", msg_id="chunk of words")
        answers: list[str] = []

        async def note(message: Msg) -> None:
            answers.append(f"{message.headers} {message.data!r}")

        await far.subscribe(inbox := far.new_inbox(), cb=note)
        own = ("rl.blob.rollout.one.far.*", "rl.blob.rollout.one.far.>")
        bodies = (b"", b'{"seq":1}', b'{"multi_last":["rl.>"],"batch":9}', b'{"seq":1,"next_by_subj":">"}')
        for pattern in (*patterns, *own):
            for body in bodies:
                await far.publish(f"$JS.API.DIRECT.GET.lachesis_one_ROLLOUTS.{pattern}", body, reply=inbox)
        await far.publish(chunks, b"between them")
        await far.request("$JS.API.INFO", timeout=30)  # by then all of it is refused or under way
        with anyio.fail_after(60):
            while len(answers) < len(own) * len(bodies):  # noqa: ASYNC110 - what it asks of its own is answered
                await anyio.sleep(0.01)
        assert not [answer for answer in answers if "words" in answer or "the other's" in answer]
        async with await secured.bus(OPERATOR) as operator:
            stored = await operator.last(ROLLOUTS, chunks)
        assert stored is not None
        assert stored.data == b"the other's"


@pytest.mark.parametrize("identity", [name for name in IDENTITIES if TABLE[name].sets])
async def test_who_may_set_a_key_cannot_have_the_server_delete_the_others(secured: Secured, identity: str) -> None:
    own = [subjects.value_subject("one", key.replace("*", "x")) for key in TABLE[identity].sets]
    async with await secured.bus("trainer") as trainer, secured.client(identity) as client:
        await trainer.put(keys.POLICY, b"precious")
        for subject in own:
            for headers in ({"Nats-Rollup": "all"}, {"Nats-Rollup": "sub"}, {"Nats-Marker-Reason": "Purge"}):
                if subject != subjects.value_subject("one", keys.POLICY):
                    await client.request(subject, b"x", headers=headers, timeout=30)
    async with await secured.bus(OPERATOR) as operator:
        policy = await operator.value(keys.POLICY)
        assert policy is not None
        assert policy.value == b"precious"


async def test_a_bucket_that_an_older_build_made_loses_that_power(
    secured: Secured, streams_config: StreamsConfig
) -> None:
    async with await secured.bus(OPERATOR) as operator:
        bucket = stream_name("one", BUCKET)
        info = json.loads((await operator.client.request(f"$JS.API.STREAM.INFO.{bucket}", timeout=30)).data)["config"]
        older = json.dumps({**info, "allow_rollup_hdrs": True}).encode()
        changed = json.loads((await operator.client.request(f"$JS.API.STREAM.UPDATE.{bucket}", older, timeout=30)).data)
        assert changed["config"]["allow_rollup_hdrs"]
        assert [line for line in await operator.ensure_streams(streams_config) if "allow_rollup_hdrs" in line]
        assert await operator.ensure_streams(streams_config) == []
