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
from lachesis.schemas.access import OBSERVER
from lachesis.schemas.errors import AccessError
from lachesis.services.micro import join_micro

RUN = "one"
LEASE = subjects.lease(RUN)
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

    async with open_service(bus, "governor", RUN) as service, bus.serve(LEASE, answer):
        await join_micro(bus, service, "grants leases")
        await bus._link.ask("$JS.API.INFO", b"", timeout_s=60)  # by then the server knows the subscriptions
        yield service


@pytest.mark.parametrize("reply", FOREIGN, ids=lambda reply: ascii(reply[:40]))
async def test_a_service_outlives_a_request_whose_answer_is_to_go_elsewhere(secured: Secured, reply: str) -> None:
    async with (
        await secured.bus("governor") as bus,
        await secured.bus("environment") as environment,
        await secured.bus(OBSERVER) as observer,
        governor(bus) as service,
    ):
        await environment.client._send_publish(LEASE, reply, b"x", 1, None)
        for subject in ("$SRV.PING", "$SRV.INFO", "$SRV.STATS", HEALTH):
            await observer.client._send_publish(subject, reply, b"x", 1, None)
        with anyio.fail_after(60):
            while bus.unanswered.count < 5:  # noqa: ASYNC110 - told by the server
                await anyio.sleep(0.05)
        assert await environment.request(LEASE, b"mine", timeout_s=60) == b"mine"
        answer = await observer.client.request(HEALTH, timeout=60)
        assert msgspec.json.decode(answer.data)["metrics"] is not None
        await service.heartbeat()
        assert "requests were not answered" in (service.vitals.note or "")


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
