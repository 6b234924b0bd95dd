"""How a run ends whose ledger is broken, sound, or cannot be looked at."""

import dataclasses
import logging

import anyio
import pytest
from unit.ledger.test_audit import RUN, make_entries, store

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import HistoryLostError, LedgerError
from lachesis.schemas import keys
from lachesis.schemas.codec import encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.subjects import LEDGER, ROLLOUTS
from lachesis.services.supervisor import ledger_check
from lachesis.services.supervisor.ledger_check import verify_ledger
from lachesis.services.supervisor.supervisor import Supervisor


@pytest.fixture
def config(tmp_path):
    return RunConfig(run=RUN, folder=str(tmp_path), environments={"words": EnvironmentConfig(kind="gateway")})


async def test_a_sound_ledger_ends_a_run_well(config):
    async with MemoryBus() as bus:
        await verify_ledger(bus, config, "")
        await store(bus, make_entries(3))
        await verify_ledger(bus, config, "")


async def test_a_broken_one_ends_it_with_the_reason(config):
    async with MemoryBus() as bus:
        await store(bus, make_entries(4))
        bus.damage(LEDGER, 2)
        with pytest.raises(LedgerError, match=r"the ledger is broken: .*entry 1 is gone.*Restore the server's store"):
            await verify_ledger(bus, config, "")


async def test_what_was_found_on_the_way_counts_in_the_end(config):
    async with MemoryBus() as bus:
        await store(bus, make_entries(2))
        with pytest.raises(LedgerError, match="it held 6 entries and holds 2 now"):
            await verify_ledger(bus, config, "it held 6 entries and holds 2 now")


async def test_a_run_whose_server_could_not_read_rollouts_does_not_end_well(config, monkeypatch):
    async with MemoryBus() as bus:
        await store(bus, make_entries(3))
        usage = bus.usage

        async def damaged(stream):
            return dataclasses.replace(await usage(stream), lost_bytes=712 if stream == ROLLOUTS else 0)

        monkeypatch.setattr(bus, "usage", damaged)
        with pytest.raises(HistoryLostError, match="could not read 712 bytes of stream ROLLOUTS when it started"):
            await verify_ledger(bus, config, "")


async def test_a_ledger_that_is_gone_is_known_by_what_was_published(config):
    async with MemoryBus() as bus:
        record = PolicyRecord(run=RUN, version="3-a-b", weights="w", tokenizer_hash="h", written_ns=1)
        await bus.put(keys.POLICY, encode(record))
        with pytest.raises(HistoryLostError, match="published weights of step 3"):
            await verify_ledger(bus, config, "")


async def test_a_server_that_does_not_answer_is_not_waited_for(config, monkeypatch, caplog):
    async with MemoryBus() as bus:
        monkeypatch.setattr(ledger_check, "_ANSWER_S", 0.01)
        monkeypatch.setattr(bus, "usage", lambda _: anyio.sleep_forever())
        with caplog.at_level(logging.WARNING), anyio.fail_after(30):
            await verify_ledger(bus, config, "")
        assert "the ledger was not verified: no answer in time" in caplog.text
        with pytest.raises(LedgerError, match="as it was found"):
            await verify_ledger(bus, config, "as it was found")


async def test_who_kills_a_run_does_not_wait_for_it(config, monkeypatch):
    supervisor = Supervisor(config, [])
    supervisor.kill()
    with anyio.fail_after(30), supervisor._verifying:
        await anyio.sleep_forever()
