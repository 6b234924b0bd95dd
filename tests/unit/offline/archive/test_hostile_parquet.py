"""Parquet files of wrong types, damaged names and large dictionaries: refused in a sentence; no number is changed."""

from pathlib import Path
from typing import Any

import pytest
from integration.archive.world import a_group

from lachesis.pipeline.common import machine_memory
from lachesis.pipeline.offline.archive.logic.row import DerivedColumns, rows_of
from lachesis.pipeline.offline.archive.parquet import ParquetWriter
from lachesis.pipeline.offline.archive.reader import PlacedGroup, read_groups
from lachesis.pipeline.tasks import arrow_rows, row_stores
from lachesis.pipeline.tasks.rows import read_file
from lachesis.schemas.errors import ConfigError

pytestmark = pytest.mark.hostile

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
TOKENS = 8
INT32, INT64 = pa.list_(pa.int32()), pa.list_(pa.int64())


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.parquet"
    with path.open("wb") as file:
        writer = ParquetWriter(file, {})
        writer.write(rows_of(a_group(1, tokens=TOKENS), 1, 1, DerivedColumns(revision="live")))
        writer.close()
    return path


def groups(path: Path) -> list[PlacedGroup]:
    return list(read_groups(path, "parquet", run="demo", foreign=None))


def changed(path: Path, column: str, value: Any, kind: Any) -> Path:
    """Write the file again with `value` in each row of `column`, and without the digest that would tell."""
    table = pq.read_table(path)
    cells = pa.array([value] * table.num_rows, kind)
    table = table.set_column(table.schema.get_field_index("digest"), "digest", pa.nulls(table.num_rows, pa.string()))
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, cells), path)
    return path


@pytest.mark.parametrize(
    "kind", [INT32, INT64, pa.list_(pa.uint8()), pa.large_list(pa.int32()), pa.list_(pa.int32(), TOKENS)]
)
def test_whole_numbers_of_any_width_are_read_as_they_are(good: Path, kind: Any) -> None:
    (one,) = groups(changed(good, "tokens", [3] * TOKENS, kind))
    assert one.group is not None, one.error
    assert [sequence.tokens.tolist() for sequence in one.group.sequences] == [[3] * TOKENS] * 4


@pytest.mark.parametrize(
    ("column", "value", "kind", "says"),
    [
        ("tokens", [(1 << 40) + 3] * TOKENS, INT64, "tokens: a number does not fit into int32"),
        ("tokens", [1 << 63] * TOKENS, pa.list_(pa.uint64()), "tokens: a number does not fit into int32"),
        ("tokens", [1.5] * TOKENS, pa.list_(pa.float64()), "tokens: a list of int32 holds something else"),
        ("tokens", [None] * TOKENS, INT32, "tokens: a list of int32 holds something else"),
        ("tokens", ["7"] * TOKENS, pa.list_(pa.string()), "tokens: a list of int32 holds something else"),
        ("tokens", [[1]] * TOKENS, pa.list_(INT32), "tokens: a list of int32 holds something else"),
        ("loss_mask", [0, *[256] * (TOKENS - 1)], INT32, "loss_mask: a number does not fit into int8"),
        ("logprobs", ["x"] * TOKENS, pa.list_(pa.string()), "logprobs: a list of float32 holds something else"),
        ("logprobs", [{"a": 1}] * TOKENS, pa.list_(pa.struct([("a", pa.int32())])), "float32 holds something else"),
    ],
)  # fmt: skip
def test_a_number_that_would_become_another_one_is_refused(
    good: Path, column: str, value: Any, kind: Any, says: str
) -> None:
    found = groups(changed(good, column, value, kind))
    assert [one.group for one in found] == [None] * len(found)
    assert says in (found[0].error or "")


@pytest.mark.parametrize("kind", [pa.string(), pa.int64(), pa.timestamp("us"), pa.map_(pa.string(), pa.int64())])
def test_a_column_of_tokens_that_holds_no_lists_is_named(good: Path, kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"good.parquet: column tokens holds values of type .*a list of numbers"):
        groups(changed(good, "tokens", None, kind))


@pytest.mark.parametrize("name", ["item", "question"])
def test_names_and_texts_that_are_no_text_are_refused(tmp_path: Path, name: str) -> None:
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    pq.write_table(pa.table({name: bad}), tmp_path / "text.parquet")
    pq.write_table(pa.table({"qqqq": ["a"]}), tmp_path / "name.parquet", store_schema=False)
    damaged = (tmp_path / "name.parquet").read_bytes().replace(b"qqqq", b"\xff\xfe\xff\xfe")
    (tmp_path / "name.parquet").write_bytes(damaged)
    for file in ("text.parquet", "name.parquet"):
        with pytest.raises(ConfigError, match=rf"data set .*{file}.*decode byte 0xff"):
            list(read_file(tmp_path / file, frozenset()))
    with pytest.raises(ConfigError, match=r"name.parquet: .*decode byte 0xff"):
        groups(tmp_path / "name.parquet")
    if name == "item":  # the others are columns that no row has
        with pytest.raises(ConfigError, match=r"text.parquet: row 1: .*decode byte 0xff"):
            groups(tmp_path / "text.parquet")


@pytest.mark.parametrize(
    "cells",
    [
        pa.array([1 << 62], pa.timestamp("us")),
        pa.array([0], pa.timestamp("us", tz="Nobody/Knows")),
        pa.array([(1 << 31) - 1], pa.date32()),
        pa.array([1 << 62], pa.duration("s")),
    ],
    ids=lambda cells: str(cells.type),
)
def test_times_that_python_has_not_are_refused_with_their_row(tmp_path: Path, cells: Any) -> None:
    pq.write_table(pa.table({"when": cells}), tmp_path / "times.parquet")
    rows = read_file(tmp_path / "times.parquet", frozenset())
    with pytest.raises(ConfigError, match=r"times.parquet rows 1 to 1: "):
        list(rows)
    with pytest.raises(ConfigError, match=r"times.parquet row 1: "):
        rows[0]


def of_one_text(text: str, rows: int) -> Any:
    """Return a column of so many references to one text."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["plain", "list", "struct"])
def test_a_text_that_many_rows_refer_to_counts_for_each_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    cells = of_one_text("x" * (1 << 20), 500)
    if shape == "list":
        cells = pa.ListArray.from_arrays(pa.array(range(501), pa.int32()), cells)
    elif shape == "struct":
        cells = pa.StructArray.from_arrays([cells], names=["a"])
    pq.write_table(pa.table({"question": cells}), tmp_path / "bomb.parquet", compression="zstd")
    assert (tmp_path / "bomb.parquet").stat().st_size < 10_000
    bound = 64 << 20
    monkeypatch.setattr(machine_memory, "free_on_machine", lambda: 2 * bound)
    with pytest.raises(ConfigError, match="its rows take more than 64 MiB of memory"):
        read_file(tmp_path / "bomb.parquet", frozenset())


def test_references_to_a_dictionary_are_read_as_their_values(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": of_one_text("why?", 3), "n": [1, 2, 3]}), tmp_path / "few.parquet")
    rows = read_file(tmp_path / "few.parquet", frozenset())
    assert list(rows) == [rows[i] for i in range(3)] == [{"question": "why?", "n": n} for n in (1, 2, 3)]


def test_rows_that_take_no_bytes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_rows, "_MAX_ROWS", 1000)
    pq.write_table(pa.table({"question": pa.nulls(1001)}), tmp_path / "nulls.parquet")
    with pytest.raises(ConfigError, match=r"^data set [^:]*nulls.parquet: it has 1001 rows; at most 1000 are read"):
        read_file(tmp_path / "nulls.parquet", frozenset())


@pytest.mark.parametrize("name", ["large.parquet", "large.jsonl", "large.json"])
def test_a_row_that_is_no_task_is_refused_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in (row_stores, arrow_rows):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 4 << 20)
    tasks = [{"question": "x" * length} for length in (9, 100, 5 << 20, 3)]
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(tasks), tmp_path / name)
    else:
        text = [f'{{"question": "{task["question"]}"}}' for task in tasks]
        (tmp_path / name).write_text("\n".join(text) if name.endswith("jsonl") else f"[{','.join(text)}]")
    with pytest.raises(ConfigError, match=rf"{name} (row|line) 3: it is larger than 4 MiB"):
        read_file(tmp_path / name, frozenset())
