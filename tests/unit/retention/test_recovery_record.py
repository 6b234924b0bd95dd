"""The retention record, made whole again from the folder's copy and from earlier recoveries."""

from contextlib import closing
from pathlib import Path
from typing import cast

import anyio
import msgspec
import pytest

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.common.disk import DeferredFile
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.retention.recovery_plan import UnusableState, _whole_record
from lachesis.pipeline.runtime.retention_record import RETENTION_FILE, follow_record, read_copy
from lachesis.schemas import keys
from lachesis.schemas.codec import encode
from lachesis.schemas.retention import Hold, LostRange, Retention
from lachesis.schemas.subjects import EVENTS, ROLLOUTS
from lachesis.services.stage_settings import recovery_settings

EMPTY = Retention(run="r")


@pytest.mark.parametrize("copied", [True, False])
async def test_a_record_that_lists_all_is_whole_however_it_lists_it(
    tmp_path: Path, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def limits(*_: object) -> dict[str, int]:
        return {ROLLOUTS: 10}  # a stand-in for what a server's streams say: this bus has none

    monkeypatch.setattr("lachesis.pipeline.retention.recovery_plan.trim_limits", limits)
    copy = EMPTY.replace(trimmed={ROLLOUTS: 5}, lost={EVENTS: [LostRange(1, 6)]}).with_orphans(ROLLOUTS, [6, 7])
    if copied:
        (tmp_path / RETENTION_FILE).write_bytes(msgspec.json.encode(copy))
    stored = copy.replace(
        trimmed={ROLLOUTS: 10},  # beyond the orphans, which the governor leaves in its list
        lost={EVENTS: [LostRange(4, 6), LostRange(1, 3)]},
        holds={"reader-1": Hold(needs={ROLLOUTS: 10}, expires_ns=1, about="a reader")},
    )
    config = RunConfig(run="r", folder=str(tmp_path), environments={"sums": EnvironmentConfig(kind="x")})
    async with MemoryBus() as bus:
        await bus.put(keys.RETENTION, encode(stored))
        record, lacks = await _whole_record(cast("NatsBus", bus), recovery_settings(config), UnusableState())
        assert (record.lost, record.trimmed, lacks) == (copy.lost, stored.trimmed, None)
        await bus.put(keys.RETENTION, encode(EMPTY))
        record, lacks = await _whole_record(cast("NatsBus", bus), recovery_settings(config), UnusableState())
        assert (record, lacks is not None) == ((copy, True) if copied else (EMPTY, False))


class NotedFile(DeferredFile):
    """Says what was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._sent, self.written = anyio.create_memory_object_stream[bytes](8)

    def write(self, content: bytes) -> None:
        super().write(content)
        self._sent.send_nowait(content)

    def close(self) -> None:
        self._sent.close()
        self.written.close()


async def test_no_record_of_another_run_takes_the_place_of_the_copy(tmp_path: Path) -> None:
    known = EMPTY.replace(lost={EVENTS: [LostRange(1, 6)]})
    later = EMPTY.replace(trimmed={ROLLOUTS: 10})
    with closing(NotedFile(tmp_path / RETENTION_FILE)) as file:
        async with MemoryBus() as bus, anyio.create_task_group() as tasks:
            await bus.put(keys.RETENTION, encode(known))
            tasks.start_soon(follow_record, bus, "r", tmp_path, file)
            await file.written.receive()
            await bus.put(keys.RETENTION, encode(later.replace(run="another")))
            await anyio.wait_all_tasks_blocked()
            assert read_copy(tmp_path, "r") == known
            await bus.put(keys.RETENTION, encode(later))
            await file.written.receive()
            assert read_copy(tmp_path, "r") == later.with_lists_of(known)
            tasks.cancel_scope.cancel()
