"""What one copy of a stream has and another lacks, saved and read again; the copies stand in for those of servers."""

import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lachesis.pipeline.bus.api import StoredMessage, StreamUsage
from lachesis.pipeline.bus.blobs import BlobHead, BlobStore
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.routing import LARGE_HEADER, chunks_subject
from lachesis.pipeline.errors import NotFoundError, StartupError
from lachesis.pipeline.retention.other_copies import SavedMessage, read_saved_rollouts, save_other_copies
from lachesis.pipeline.retention.recovery_record import SavedCopy
from lachesis.schemas import subjects
from lachesis.schemas.subjects import EVENTS, ROLLOUTS

RUN = "r"
PLACE = subjects.rollout(RUN, "sums")
Copy = Sequence[StoredMessage]


def message(seq: int, time_ns: int = 0, *, subject: str = PLACE, data: bytes = b"x", **headers: str) -> StoredMessage:
    return StoredMessage(ROLLOUTS, subject, seq, data, time_ns or seq, headers)


class Cluster:
    """The copies of one stream by server, its leader's first. It stands in for servers of which two are older."""

    run = RUN

    def __init__(self, *copies: Copy) -> None:
        self.copies = {f"s{number}": copy for number, copy in enumerate(copies)}
        self.read = 0

    async def servers_of(self, _: str) -> list[str]:
        return list(self.copies)

    async def usage(self, _: str) -> StreamUsage:
        return StreamUsage(1, max((one.seq for one in self.copies["s0"]), default=0), 0, 0, 0)

    async def read_copy(
        self, _: str, server: str, *, start: int, headers_only: bool = False, limit: int | None = None
    ) -> AsyncGenerator[StoredMessage]:
        for one in [one for one in self.copies[server] if one.seq >= start][:limit]:
            self.read += 1
            yield replace(one, data=b"") if headers_only else one

    async def get(self, _: str, seq: int) -> StoredMessage:
        for one in self.copies["s0"]:
            if one.seq == seq:
                return one
        raise NotFoundError(f"sequence {seq}")

    async def join(self, head: StoredMessage, fetch: Any) -> StoredMessage:
        return await BlobStore(cast("Any", None), fetch).join(head)


async def save(cluster: Cluster, folder: Path, stream: str = ROLLOUTS) -> list[SavedCopy]:
    return await save_other_copies(cast("NatsBus", cluster), [stream], folder, "plan")


async def stored_again(cluster: Cluster, folder: Path, saved: list[SavedCopy]) -> list[StoredMessage]:
    return [one async for one in read_saved_rollouts(cast("NatsBus", cluster), folder, saved)]


def saved_in(folder: Path, copy: SavedCopy) -> list[tuple[int, int]]:
    lines = (folder / copy.file).read_bytes().splitlines()
    return [(one.seq, one.time_ns) for one in map(msgspec.json.Decoder(SavedMessage).decode, lines)]


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


@st.composite
def copies(draw: st.DrawFn) -> tuple[Copy, Copy]:
    """Return an older leader's copy and another, the same up to where they part; what was trimmed only it may hold."""
    shared, ends = draw(st.integers(0, 12)), (draw(st.integers(0, 8)), draw(st.integers(0, 8)))
    made, first = [], 1
    for number, more in enumerate(ends):
        times = [*range(1, shared + 1), *(1000 * (number + 1) + seq for seq in range(shared + 1, shared + more + 1))]
        kept = draw(st.lists(st.booleans(), min_size=len(times), max_size=len(times)))
        first = draw(st.integers(first, max(first, shared)))
        made.append([message(seq, time) for seq, (time, keep) in enumerate(zip(times, kept, strict=True), 1)
                     if seq >= first and (keep or seq <= shared)])  # fmt: skip
    return made[0], made[1]


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(both=copies())
async def test_what_the_leader_lacks_is_saved_and_nothing_else(both: tuple[Copy, Copy], tmp_path: Path) -> None:
    leader, other = both
    known = {(one.seq, one.time_ns) for one in leader}
    alone = [(one.seq, one.time_ns) for one in other if (one.seq, one.time_ns) not in known]
    folder = tmp_path / secrets.token_hex(8)
    saved = await save(Cluster(leader, other), folder)
    assert [(one.server, one.messages) for one in saved] == ([("s1", len(alone))] if alone else [])
    assert [line for one in saved for line in saved_in(folder, one)] == alone
    assert {one.name for one in files(folder)} == {one.file for one in saved}, "nothing half written stays"


async def test_of_a_long_history_only_the_end_is_compared(tmp_path: Path) -> None:
    shared = [message(seq) for seq in range(1, 5001)]
    cluster = Cluster(shared, [*shared, message(5001)])
    assert [one.messages for one in await save(cluster, tmp_path)] == [1]
    assert cluster.read < 20


async def test_a_rollout_is_stored_again_once_and_whole_though_its_chunks_lie_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, chunks = b"a" * 10, chunks_subject(PLACE, "0" * 32)
    head = BlobHead(size=len(data), chunks=[1], sha256=hashlib.sha256(data).digest())
    large = message(3, 33, data=msgspec.msgpack.encode(head), **{LARGE_HEADER: chunks})
    chunk, small, own = message(1, 1, subject=chunks, data=data), message(2, 22, data=b"small"), message(1, 7)
    for leader in ([chunk], [own], []):
        cluster = Cluster(leader, [chunk, small, large], [chunk, small])
        saved = await save(cluster, tmp_path)
        found = await stored_again(cluster, tmp_path, saved)
        assert [(one.seq, one.data) for one in found] == [(2, b"small"), (3, data)], leader
        assert LARGE_HEADER not in found[1].headers
    cluster = Cluster([own], [small, large])
    with caplog.at_level(logging.WARNING):
        found = await stored_again(cluster, tmp_path, await save(cluster, tmp_path))
    assert [one.data for one in found] == [b"small"]
    assert "rollout 3 of " in caplog.text
    assert "cannot be stored again" in caplog.text


async def test_other_streams_are_saved_and_not_stored_again(tmp_path: Path) -> None:
    cluster = Cluster([], [message(1, subject=f"rl.score.{RUN}.live.sums")])
    saved = await save(cluster, tmp_path, EVENTS)
    assert [one.messages for one in saved] == [1]
    assert await stored_again(cluster, tmp_path, saved) == []


async def test_a_file_that_cannot_be_written_is_named_and_says_that_nothing_was_changed(tmp_path: Path) -> None:
    (tmp_path / f"plan.{ROLLOUTS}.1.jsonl").mkdir()
    with pytest.raises(StartupError, match="No copy was changed"):
        await save(Cluster([], [message(1)]), tmp_path)
