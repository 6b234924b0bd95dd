"""A value of the gateway's key that cannot be read ends the gateway in one line."""

import logging

import msgspec
import pytest

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.extensions.atropos.gateway.keys import stored_key
from lachesis.pipeline.extensions.atropos.gateway.store import GatewayStore
from lachesis.services.process.service_process import EXIT_STARTUP, _explain


@pytest.mark.parametrize("damage", [b"", b"not msgpack", msgspec.msgpack.encode([1, 2]), b"\x91" * 5000])
async def test_an_unreadable_key_ends_the_gateway_in_one_line(damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    bus = MemoryBus()
    await bus.put(stored_key("registry"), damage)
    caplog.set_level(logging.ERROR)
    with pytest.raises(Exception, match=r".") as caught:
        await GatewayStore.open(bus, [])
    assert _explain(BaseExceptionGroup("of a task group", [caught.value])) == EXIT_STARTUP
    (said,) = caplog.records
    assert said.exc_info is None
    assert f"the key {stored_key('registry')!r}" in said.getMessage()
    assert "lachesis runs recover" in said.getMessage()
    assert "\n" not in said.getMessage()
