"""Commits and snapshots forged with a stateful service's own key: its start names the one command that leads back."""

import hashlib
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from integration.harness import SUMS

from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import LedgerError
from lachesis.pipeline.health.stage import AlertWriter
from lachesis.pipeline.ledger.rollbacks import refuse_rolled_back
from lachesis.pipeline.normalizer.stage import RewardWriter
from lachesis.pipeline.retention.recovery import apply_plan
from lachesis.pipeline.retention.recovery_plan import make_plan
from lachesis.pipeline.runtime import stream_marks
from lachesis.pipeline.runtime.commitlog import CommitLog
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.alerts import AlertEvent, EnvironmentStanding
from lachesis.schemas.annotations import Commit, CurriculumEvent, RewardEvent, StreamMark
from lachesis.schemas.codec import SCHEMA_VERSION, Event, encode
from lachesis.schemas.control import StateSnapshot
from lachesis.schemas.errors import DataError
from lachesis.schemas.subjects import LEDGER, ROLLOUTS
from lachesis.services.cli.recover import describe_plan
from lachesis.services.run.unusable_states import find_unusable
from lachesis.services.stage_settings import health_settings, ledger_settings, normalizer_settings, recovery_settings

RUN = "one"
GARBAGE = msgspec.msgpack.encode({"no": "state"})
KINDS: dict[str, subjects.Kind] = {"health": "alert", "normalizer": "reward", "curriculum": "curriculum"}


@pytest.fixture
async def bus(tmp_path: Path, streams_config: StreamsConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NatsBus]:
    monkeypatch.setattr(stream_marks, "BELIEVE_LOSS_S", 0.5)
    async with (
        EmbeddedServer(tmp_path / "store", ServerConfig(max_file_bytes=4 << 30)) as server,
        await connect(server.url, run=RUN, name="tests", token=server.token) as made,
    ):
        await made.ensure_streams(streams_config)
        yield made


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "run").mkdir()
    environments = {"sums": EnvironmentConfig(kind=f"{SUMS}:Sums", samples=2)}
    return RunConfig(run=RUN, folder=str(tmp_path / "run"), environments=environments)


def forged_event(stage: str, commit: Commit) -> Event:
    common: dict[str, Any] = {"run": RUN, "env": "sums", "revision": "live", "commit": commit}
    match stage:
        case "health":
            standing = EnvironmentStanding()
            return AlertEvent(**common, window=0, groups=0, source="groups", results=[], standing=standing)
        case "normalizer":
            return RewardEvent(**common, advantage="a", groups=[])
        case _:
            return CurriculumEvent(**common, strategy="irt", snapshot_id="s", observed=[])


def garbage(index: int) -> Commit:
    return Commit(term="t", index=index, cursors={}, delta=GARBAGE, crc32=zlib.crc32(GARBAGE))


def wrong_sum(index: int) -> Commit:
    return Commit(term="t", index=index, cursors={}, delta=GARBAGE, crc32=1)


def jump(index: int) -> Commit:
    return Commit(term="t", index=index + 1000, cursors={}, delta=b"", crc32=0)


def far(index: int) -> Commit:
    """Names a message that no stream ever held: filling up to it would take days."""
    return Commit(term="t", index=index, cursors={}, delta=b"", crc32=0, read={ROLLOUTS: StreamMark(10**12, 1)})


async def forge(bus: NatsBus, stage: str, how: Callable[[int], Commit] | str, index: int) -> None:
    subject, state = subjects.event(KINDS[stage], RUN, "live", "sums"), subjects.state(RUN, stage, "live", "sums")
    if callable(how):
        await bus.publish(subject, encode(forged_event(stage, how(index))), msg_id="forged")
    elif how == "newer":
        await bus.publish(subject, msgspec.msgpack.encode({"v": SCHEMA_VERSION + 1}), msg_id="forged")
    else:
        snapshot = StateSnapshot(
            stage=stage, index=index, covers=0, cursors={}, state=GARBAGE, sha256=hashlib.sha256(GARBAGE).digest()
        )
        if how == "far cover":
            snapshot = snapshot.replace(covers=10**12, index=10**9)
        if how == "far snapshot":
            snapshot = snapshot.replace(
                state=b"", sha256=hashlib.sha256(b"").digest(), read={LEDGER: StreamMark(10**12, 1)}
            )
        await bus.publish(state, encode(snapshot), msg_id="forged")


async def recover(bus: NatsBus, config: RunConfig) -> list[str]:
    plan = await make_plan(bus, recovery_settings(config), "forged", await find_unusable(bus, config))
    assert plan is not None
    await apply_plan(bus, recovery_settings(config), plan)
    await refuse_rolled_back(bus, ledger_settings(config))
    assert await make_plan(bus, recovery_settings(config), "again", await find_unusable(bus, config)) is None
    return describe_plan(plan, begun=False)


@pytest.mark.parametrize("how", [garbage, wrong_sum, jump, far, "newer", "snapshot", "far snapshot", "far cover"])
async def test_health_goes_on_with_what_it_had_before(
    bus: NatsBus, config: RunConfig, how: Any, caplog: pytest.LogCaptureFixture
) -> None:
    writer = AlertWriter(Service(bus, "health", RUN), health_settings(config), "sums")
    await writer.open()
    for seq in range(1, 4):
        writer.monitor.resume(seq, seq)
        await writer._write("resume", [])
    await forge(bus, "health", how, 3)
    with pytest.raises((LedgerError, DataError)) as refused:
        await AlertWriter(Service(bus, "health", RUN), health_settings(config), "sums").open()
    assert "lachesis runs recover" in str(refused.value)
    caplog.clear()
    assert "the health of sums cannot use its own messages" in "\n".join(await recover(bus, config))
    if "snapshot" not in str(how) and how != "far cover":  # real commits do not follow a forged snapshot
        assert "not written by its only writer" not in caplog.text
    for expected in (3, 4):  # twice: what it writes now follows in turn
        again = AlertWriter(Service(bus, "health", RUN), health_settings(config), "sums")
        await again.open()
        assert again.monitor.resumed == expected
        again.monitor.resume(expected + 1, 0)
        await again._write("resume", [])


@pytest.mark.parametrize("how", [garbage, wrong_sum, jump, "newer", "snapshot"])
async def test_the_normalizer_goes_on(bus: NatsBus, config: RunConfig, how: Any) -> None:
    await forge(bus, "normalizer", how, 0)
    with pytest.raises((LedgerError, DataError), match="lachesis runs recover"):
        await RewardWriter(Service(bus, "normalizer", RUN), normalizer_settings(config), "sums").open()
    await recover(bus, config)
    writer = RewardWriter(Service(bus, "normalizer", RUN), normalizer_settings(config), "sums")
    await writer.open()
    assert writer.cursors == {"ROLLOUTS": 1, "EVENTS": 1}


@pytest.mark.slow
@pytest.mark.parametrize("how", [garbage, wrong_sum, jump, "newer", "snapshot", "far cover"])
async def test_the_curriculum_goes_on(bus: NatsBus, config: RunConfig, how: Any) -> None:
    await forge(bus, "curriculum", how, 0)
    assert "the curriculum of sums cannot use its own messages" in "\n".join(await recover(bus, config))
    _, restored = await CommitLog.open(
        bus, CurriculumEvent, lambda event: event.commit, subject=subjects.event("curriculum", RUN, "live", "sums"),
        state_subject=subjects.state(RUN, "curriculum", "live", "sums"), stage="curriculum", term="t",
    )  # fmt: skip
    assert (restored.state, restored.deltas) == (None, [])


async def test_what_keeps_a_stage_from_its_state_otherwise_is_no_forgery(
    bus: NatsBus, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    await forge(bus, "curriculum", garbage, 0)
    kind = EnvironmentConfig(kind="nowhere_at_all:Sums", samples=2)
    found = await find_unusable(bus, msgspec.structs.replace(config, environments={"sums": kind}))
    assert (found.left_out, found.problems) == ({}, [])
    assert "the environment cannot be loaded here" in caplog.text


async def test_a_snapshot_that_was_left_out_excuses_no_gap_of_another_stage(bus: NatsBus, config: RunConfig) -> None:
    await forge(bus, "health", "snapshot", 0)
    await recover(bus, config)
    await forge(bus, "normalizer", jump, 0)
    with pytest.raises(LedgerError, match="commits are gone"):
        await RewardWriter(Service(bus, "normalizer", RUN), normalizer_settings(config), "sums").open()
