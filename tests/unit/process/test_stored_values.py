"""A key of the bucket that a service goes on from and cannot read ends it in one line, with the way out."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import numpy as np
import pytest

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.config.evaluation_sources import held_out_rule
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.environment.epoch import Claimer, EpochOrder
from lachesis.pipeline.environment.epoch_claims import EpochClaims
from lachesis.pipeline.environment.held_out import read_held_out, settle_held_out
from lachesis.pipeline.runtime.retention_record import read_record
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import keys
from lachesis.schemas.codec import SCHEMA_VERSION
from lachesis.services.process.service_process import EXIT_STARTUP, _explain

CONFIG = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x")})
KEYS = np.arange(20, dtype=np.uint64)


def claims(service: Service) -> EpochClaims:
    order = EpochOrder(0, np.ones(20, bool), KEYS)
    return EpochClaims(service, "sums", order, Claimer("environment-1", 1), ttl_s=1.0)


def reads(service: Service) -> dict[str, Callable[[], Awaitable[object]]]:
    """By key what a service does first with it."""
    return {
        keys.held_out("sums"): partial(read_held_out, service, "sums"),
        keys.held_out("sums") + " settled": partial(
            settle_held_out, service, CONFIG.path, "sums", held_out_rule(CONFIG, "sums"), KEYS
        ),
        keys.epoch("sums"): claims(service).claim,
        keys.RETENTION: partial(read_record, service.bus, "r"),
    }


NAMES = list(reads(Service(MemoryBus(), "environment", "r")))
DAMAGED = {
    "empty": b"",
    "text": b"not msgpack",
    "another type": msgspec.msgpack.encode({"v": 1, "order": 3, "seed": "x", "run": 5, "trimmed": 1, "next_id": []}),
    "a list": msgspec.msgpack.encode([1, 2]),
    "cut": msgspec.msgpack.encode({"v": 1, "order": "3-00"})[:-3],
    "deep": b"\x91" * 5000,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGED)
async def test_an_unreadable_key_ends_its_service_in_one_line(
    name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = name.partition(" ")[0]
    bus = MemoryBus()
    await bus.put(key, DAMAGED[damage])
    caplog.set_level(logging.ERROR)
    with pytest.raises(Exception, match=r".") as caught:
        await reads(Service(bus, "environment", "r"))[name]()
    assert _explain(BaseExceptionGroup("of a task group", [caught.value])) == EXIT_STARTUP
    (said,) = caplog.records
    assert said.exc_info is None
    assert f"the key {key!r}" in said.getMessage()
    assert "lachesis runs recover" in said.getMessage()
    assert "\n" not in said.getMessage()


@pytest.mark.parametrize("name", NAMES)
async def test_a_key_of_a_newer_build_does_so_too(name: str, caplog: pytest.LogCaptureFixture) -> None:
    key = name.partition(" ")[0]
    bus = MemoryBus()
    await bus.put(key, msgspec.msgpack.encode({"v": SCHEMA_VERSION + 1}))
    with pytest.raises(Exception, match=r".") as caught:
        await reads(Service(bus, "environment", "r"))[name]()
    assert _explain(caught.value) == EXIT_STARTUP
    assert f"the key {key!r}" in caplog.text
    assert "Traceback" not in caplog.text
