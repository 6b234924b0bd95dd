"""Standings: the newest alert event of an environment counts, in whatever order events are read."""

import pytest

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.health.environment_status import EnvironmentStatuses, halted_reason
from lachesis.schemas.alerts import AlertEvent, EnvironmentStanding
from lachesis.schemas.annotations import Commit
from lachesis.schemas.codec import encode

BUS = MemoryBus()


def stored(seq, standing, env="sums"):
    event = AlertEvent(
        run="r", env=env, revision="live", commit=Commit(term="t", index=seq, cursors={}, delta=b"", crc32=0), window=0,
        groups=1, source="groups", results=[], standing=standing,
    )  # fmt: skip
    return StoredMessage("EVENTS", f"rl.alert.r.live.{env}", seq, encode(event), 0)


async def test_an_older_event_takes_nothing_back():
    standings = EnvironmentStatuses()
    halted = EnvironmentStanding(halted=True, quarantined_from=3, cause="truncated", since=1)
    assert await standings.apply_alert(BUS, stored(5, halted)) == "sums"
    assert await standings.apply_alert(BUS, stored(4, EnvironmentStanding())) is None
    assert await standings.apply_alert(BUS, stored(5, EnvironmentStanding())) is None
    assert standings.of("sums") == halted
    assert await standings.apply_alert(BUS, stored(6, EnvironmentStanding())) == "sums"
    assert standings.of("sums") == EnvironmentStanding()
    assert (standings.last_seq, standings.environments) == (6, ["sums"])
    assert standings.of("other") == EnvironmentStanding()


async def test_what_cannot_be_read_changes_nothing():
    standings = EnvironmentStatuses()
    await standings.apply_alert(BUS, stored(5, EnvironmentStanding(halted=True)))
    assert await standings.apply_alert(BUS, StoredMessage("EVENTS", "rl.alert.r.live.sums", 6, b"\xc1", 0)) is None
    assert standings.of("sums").halted


@pytest.mark.parametrize("halted", [True, False])
def test_a_halt_says_how_to_go_on(halted):
    reason = halted_reason("sums", EnvironmentStanding(halted=halted, cause="truncated"))
    assert (reason is not None) == halted
    if reason:
        assert "truncated" in reason
        assert "`lachesis resume sums`" in reason
