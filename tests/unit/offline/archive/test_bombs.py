"""Small files that ask for gigabytes are refused in a sentence, within the memory that reading may take."""

import bz2
import gzip
import lzma
import os
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from lachesis.pipeline.common import machine_memory, memory_bound
from lachesis.pipeline.common.memory_bound import bounded_memory
from lachesis.pipeline.offline.archive import reader
from lachesis.pipeline.offline.archive.parquet import arrow_schema
from lachesis.pipeline.offline.archive.reader import read_groups
from lachesis.pipeline.tasks.rows import read_file
from lachesis.schemas.errors import ConfigError

pytestmark = pytest.mark.hostile

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
VALUES = 30_000_000
LIMIT_BYTES = 64 << 20


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of one row with a list of zeros, some kilobytes for 120 MB."""
    path = tmp_path_factory.mktemp("bombs") / "bomb.parquet"
    zeros = pa.ListArray.from_arrays(pa.array([0, VALUES], pa.int32()), pa.array(np.zeros(VALUES, np.int32)))
    columns = [zeros if field.name == "tokens" else pa.nulls(1, field.type) for field in arrow_schema()]
    pq.write_table(pa.table(columns, schema=arrow_schema()), path, compression="zstd")
    assert path.stat().st_size < 100_000
    return path


@pytest.mark.slow
def test_an_archive_that_asks_for_too_much_memory_is_refused(bomb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_READING_BYTES", LIMIT_BYTES)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(ConfigError, match=r"bomb.parquet: reading its next rows takes more than 64 MiB"):
        list(read_groups(bomb, "parquet", run="r", foreign=None))
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.slow
def test_a_line_that_asks_for_too_much_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_READING_BYTES", LIMIT_BYTES)
    path = tmp_path / "bomb.jsonl"
    path.write_bytes(b'{"schema": "x", "tokens": [' + b"1000," * 5_000_000 + b"1]}\n")
    with pytest.raises(ConfigError, match=r"bomb.jsonl: reading its next rows takes more than 64 MiB"):
        list(read_groups(path, "jsonl", run="r", foreign=None))


def test_a_data_set_that_asks_for_too_much_memory_is_refused(bomb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "free_on_machine", lambda: 2 * LIMIT_BYTES)
    with pytest.raises(ConfigError, match=r"its rows take more than 64 MiB of memory, half of what is free"):
        read_file(bomb, frozenset())


@pytest.mark.parametrize("bounded", [True, False], ids=["by the system", "by its count alone"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "json", "parquet"])
@pytest.mark.parametrize("packing", ["gz", "bz2", "xz", "zst"])
def test_a_packed_data_set_is_unpacked_within_what_reading_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, kind: str, bounded: bool
) -> None:
    zeros = b"0" * (5 << 20)
    made_by = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}
    path = tmp_path / f"bomb.{kind}.{packing}"
    path.write_bytes(made_by[packing](zeros) * 20 if packing != "zst" else zstd(zeros * 20))
    assert path.stat().st_size < 200_000
    monkeypatch.setattr(machine_memory, "free_on_machine", lambda: 8 << 20)
    if not bounded:  # as where the system does not say what is mapped
        monkeypatch.setattr(memory_bound, "_data_bytes", lambda: None)
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"bomb.* its rows take more than 4 MiB of memory"):
        read_file(path, frozenset())
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 40 << 20


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv.gz", "x.parquet", "folder.parquet/x"])
def test_a_data_set_that_would_be_read_for_ever_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    for make in (os.mkfifo, lambda place: place.symlink_to("/dev/zero")):
        make(path)
        with pytest.raises(ConfigError, match=r"data set .*: is no regular file"):
            read_file(tmp_path / name.partition("/")[0], frozenset())
        path.unlink()


def test_of_bounds_that_overlap_the_last_one_lifts_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    first, second = bounded_memory(LIMIT_BYTES), bounded_memory(LIMIT_BYTES << 4)
    with first:
        limit = resource.getrlimit(resource.RLIMIT_DATA)
        second.__enter__()
        assert resource.getrlimit(resource.RLIMIT_DATA) == limit != before
    with pytest.raises(MemoryError):
        bytearray(256 << 20)
    second.__exit__(None, None, None)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert len(bytearray(256 << 20)) == 256 << 20
