"""A request whose answer is to go to a foreign subject: it gets none, and the service goes on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import msgspec
import nats.errors
import pytest
from integration.security.secured import Secured
from nats.aio.msg import Msg

from lachesis.pipeline.access import OBSERVER, OPERATOR
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.reply_subjects import is_inbox
from lachesis.pipeline.errors import AccessError
from lachesis.pipeline.runtime.service import Service, open_service
from lachesis.schemas import subjects
from lachesis.services.process.nats_micro import join_micro

RUN = "one"
LEASE = subjects.lease(RUN, "words")
HEALTH = subjects.health(RUN, "governor")
FOREIGN = [
    "rl.any.thing",
    "rl.ledger.one.main",
    "$JS.API.STREAM.PURGE.lachesis_one_LEDGER",
    "_INBOX",
    "_INBOX_scorer.of.another",
    "_INBOX_observer.>",
    "_INBOX_observer.*",
    "_INBOX_observer." + "x" * 3900,
    "_INBOX_environment.\x0b",
    "_INBOX_environment.\u00e9\u202e",
    "\x0b",
    ">",
    "*",
]


@asynccontextmanager
async def governor(bus: NatsBus) -> AsyncIterator[Service]:
    async def answer(data: bytes) -> bytes:
        return data

    async with open_service(bus, "governor", RUN) as service, bus.serve(subjects.lease(RUN), answer):
        await join_micro(bus, service, "grants leases")
        await bus._link.request_once("$JS.API.INFO", b"", timeout_s=60)  # by then the server knows the subscriptions
        yield service


async def send_all(lease: NatsBus, health: NatsBus, reply: str) -> None:
    """Send five requests whose answers are to go to `reply`."""
    await lease.client._send_publish(LEASE, reply, b"x", 1, None)
    for subject in ("$SRV.PING", "$SRV.INFO", "$SRV.STATS", HEALTH):
        await health.client._send_publish(subject, reply, b"x", 1, None)


async def answered(asking: NatsBus, subject: str) -> Msg:
    """Ask until there is an answer.

    Once one goes to `>`, the server forgets where others under way to that account were to go: the account that sent it
    so harms itself, and no other.
    """
    with anyio.fail_after(60):
        while True:
            with suppress(nats.errors.TimeoutError):
                return await asking.client.request(subject, timeout=2)


@pytest.mark.parametrize("reply", FOREIGN, ids=lambda reply: ascii(reply[:40]))
async def test_no_answer_leaves_the_account_of_who_asked_for_it(secured: Secured, reply: str) -> None:
    async with (
        await secured.bus("governor") as bus,
        await secured.bus("environment-words") as environment,
        await secured.bus(OBSERVER) as observer,
        await secured.bus(OPERATOR) as operator,
        governor(bus) as service,
    ):
        before = [(await observer.usage(stream)).last for stream in subjects.STREAMS]
        await send_all(environment, observer, reply)
        assert await operator.request(LEASE, b"mine", timeout_s=60) == b"mine"
        answer = await answered(observer, HEALTH)
        assert msgspec.json.decode(answer.data)["metrics"] is not None
        await service.heartbeat()
        assert bus.reconnects == 0
        assert [(await observer.usage(stream)).last for stream in subjects.STREAMS] == before


@pytest.mark.parametrize(
    "reply", [reply for reply in FOREIGN if not is_inbox(reply)], ids=lambda reply: ascii(reply[:40])
)
async def test_a_server_without_accounts_gets_no_answer_for_a_foreign_subject(
    nats_server: EmbeddedServer, reply: str
) -> None:
    async with (
        await connect(nats_server.url, name="governor", run=RUN, token=nats_server.token) as bus,
        await connect(nats_server.url, name="environment", run=RUN, token=nats_server.token) as environment,
        governor(bus) as service,
    ):
        await send_all(environment, environment, reply)
        with anyio.fail_after(60):
            while bus.unanswered.count < 5:  # noqa: ASYNC110 - the server reports it
                await anyio.sleep(0.01)
        assert await environment.request(LEASE, b"mine", timeout_s=60) == b"mine"
        await service.heartbeat()
        assert "requests were not answered" in (service.vitals.status_text or "")


async def test_a_service_does_not_send_back_headers_as_large_as_the_server_takes(secured: Secured) -> None:
    async with await secured.bus("governor") as bus, await secured.bus(OBSERVER) as observer, governor(bus):
        large = observer.client.max_payload - 200
        headers = {"x": "y" * large}
        answer = await observer.client.request("$SRV.PING", b"", timeout=60, headers=headers)
        assert answer.headers is None
        assert bus.reconnects == 0
        await bus.request(HEALTH, b"", timeout_s=60)


async def test_an_answer_that_the_server_refuses_ends_nothing(nats_server: EmbeddedServer) -> None:
    async with await connect(nats_server.url, name="governor", run=RUN, token=nats_server.token) as bus:
        refused = 'nats: Permissions Violation for Publish to "{}"'
        await bus._link.on_error(nats.errors.Error(refused.format("_INBOX_scorer.of.another")))
        bus._link.check()
        assert bus.unanswered.count == 1
        await bus._link.on_error(nats.errors.Error(refused.format("_INBOX_scorer.>")))
        with pytest.raises(AccessError, match="was refused by the server"):
            bus._link.check()


async def test_a_refusal_that_ends_a_connection_names_its_subject(secured: Secured) -> None:
    async with await secured.bus("governor") as bus:
        await bus.broadcast("rl.ledger.one.main", b"")
        with pytest.raises(AccessError, match=r"publish to .rl.ledger.one.main."), anyio.fail_after(60):
            await bus.request(LEASE, b"", timeout_s=60)
