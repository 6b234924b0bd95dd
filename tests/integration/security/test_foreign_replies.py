"""A request whose answer is to go to a foreign subject: it gets none, and the service that it asked goes on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
from integration.security.secured import Secured

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.stage.service import Service, open_service
from lachesis.schemas import subjects
from lachesis.schemas.access import OBSERVER, OPERATOR
from lachesis.schemas.errors import AccessError
from lachesis.services.process.micro import join_micro

RUN = "one"
LEASE = subjects.lease(RUN, "words")
HEALTH = subjects.health(RUN, "governor")
FOREIGN = [
    "rl.any.thing",
    "rl.ledger.one.main",
    "$JS.API.STREAM.PURGE.LEDGER",
    "_INBOX",
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

    async with open_service(bus, "governor", RUN) as service, bus.serve(LEASE, answer):
        await join_micro(bus, service, "grants leases")
        await bus._link.ask("$JS.API.INFO", b"", timeout_s=60)  # by then the server knows the subscriptions
        yield service


async def ask_with_foreign_replies(asker: NatsBus, observer: NatsBus, reply: str) -> None:
    await asker.client._send_publish(LEASE, reply, b"x", 1, None)
    for subject in ("$SRV.PING", "$SRV.INFO", "$SRV.STATS", HEALTH):
        await observer.client._send_publish(subject, reply, b"x", 1, None)


async def check_honest_answers(asker: NatsBus, observer: NatsBus) -> None:
    assert await asker.request(LEASE, b"mine", timeout_s=60) == b"mine"
    answer = await observer.client.request(HEALTH, timeout=60)
    assert msgspec.json.decode(answer.data)["metrics"] is not None


@pytest.mark.parametrize("reply", FOREIGN, ids=lambda reply: ascii(reply[:40]))
async def test_a_service_outlives_a_request_whose_answer_is_to_go_elsewhere(nats_bus: NatsBus, reply: str) -> None:
    """With one token for all: the service itself decides where an answer may go."""
    async with governor(nats_bus) as service:
        await ask_with_foreign_replies(nats_bus, nats_bus, reply)
        with anyio.fail_after(60):
            while nats_bus.unanswered.count < 5:  # noqa: ASYNC110 - told by the server
                await anyio.sleep(0.05)
        await check_honest_answers(nats_bus, nats_bus)
        await service.heartbeat()
        assert "requests were not answered" in (service.vitals.note or "")


async def test_the_server_sends_answers_to_nobody_but_the_account_that_asked(secured: Secured) -> None:
    """With a key for each identity, a service never sees the reply subject that its asker chose.

    One that asks for answers on `>` may lose answers to other requests of its own account; nobody else does.
    """
    async with (
        await secured.bus("governor") as bus,
        await secured.bus("environment-words") as environment,
        await secured.bus(OBSERVER) as observer,
        await secured.bus(OPERATOR) as operator,
        governor(bus),
    ):
        for reply in [*FOREIGN, "_INBOX_scorer.of.another"]:
            await ask_with_foreign_replies(environment, observer, reply)
            answer = await operator.client.request("$SRV.PING", timeout=60)
            assert msgspec.json.decode(answer.data)["name"] == "lachesis-governor"
        assert bus.unanswered.count == 0
        assert bus.reconnects == 0


async def test_a_service_does_not_send_back_headers_as_large_as_the_server_takes(secured: Secured) -> None:
    async with await secured.bus("governor") as bus, await secured.bus(OBSERVER) as observer, governor(bus):
        large = observer.client.max_payload - 200
        headers = {"x": "y" * large}
        answer = await observer.client.request("$SRV.PING", b"", timeout=60, headers=headers)
        assert answer.headers is None
        assert bus.reconnects == 0
        await bus.request(HEALTH, b"", timeout_s=60)


async def test_a_refusal_that_ends_a_connection_names_its_subject(secured: Secured) -> None:
    async with await secured.bus("governor") as bus:
        await bus.broadcast("rl.ledger.one.main", b"")
        with pytest.raises(AccessError, match=r"publish to .rl.ledger.one.main."), anyio.fail_after(60):
            await bus.request(LEASE, b"", timeout_s=60)
