"""The NATS micro protocol, as `nats micro` speaks it."""

import msgspec
import pytest
from nats.errors import FlushTimeoutError

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.runtime.service import open_service
from lachesis.schemas import subjects
from lachesis.services.process.nats_micro import join_micro


@pytest.mark.parametrize("away", [False, True])
async def test_a_service_answers_whether_or_not_its_server_was_away(
    nats_bus: NatsBus, away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unheard(timeout: int = 10) -> None:
        raise FlushTimeoutError

    async with open_service(nats_bus, "governor", "run") as service:
        with monkeypatch.context() as patch:
            if away:
                patch.setattr(nats_bus.client, "flush", unheard)
            await join_micro(nats_bus, service, "grants leases")
        name = subjects.service_name("governor")
        told = msgspec.json.decode((await nats_bus.client.request(f"$SRV.INFO.{name}", timeout=30)).data)
        assert (told["name"], told["description"], told["metadata"]["run"]) == (name, "grants leases", "run")
        answer = await nats_bus.client.request(subjects.health("run", "governor"), timeout=30)
        assert msgspec.json.decode(answer.data)["state"] == service.vitals.report().state
