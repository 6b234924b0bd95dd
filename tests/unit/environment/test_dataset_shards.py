"""A data set in several files: a list, a glob or a folder of shards."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lachesis.pipeline.common.paths import resolve_paths
from lachesis.pipeline.config.run import EnvironmentConfig
from lachesis.pipeline.environment.dataset import Dataset
from lachesis.schemas.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, count in ((10, 1), (2, 2), (1, 3)):
        write(tmp_path / f"part-{number}.jsonl", [{"prompt": f"{number}/{i}", "answer": f"{i}"} for i in range(count)])
    return tmp_path


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def asked(env: Dataset) -> list[Any]:
    return [env.task(i).prompt[-1].content for i in range(len(env))]


IN_ORDER = ["1/0", "1/1", "1/2", "2/0", "2/1", "10/0"]


def test_shards_are_read_in_the_order_of_their_numbers(folder: Path) -> None:
    (folder / "_SUCCESS").touch()
    (folder / "README.md").write_text("about")
    assert asked(Dataset(path=str(folder))) == IN_ORDER
    assert asked(Dataset(path=f"{folder}/part-*.jsonl")) == IN_ORDER
    assert asked(Dataset(path=[f"{folder}/part-2.jsonl", f"{folder}/part-1*.jsonl"])) == [
        "2/0", "2/1", "1/0", "1/1", "1/2", "10/0",
    ]  # fmt: skip
    assert asked(Dataset(path=str(folder), size=4)) == IN_ORDER[:4]


def test_identity_is_by_content_however_the_rows_are_split(folder: Path) -> None:
    whole = folder.parent / "whole.jsonl"
    whole.write_text("".join((folder / f"part-{number}.jsonl").read_text() for number in (1, 2, 10)))
    split, joined = Dataset(path=str(folder)), Dataset(path=str(whole))
    assert list(split.item_keys()) == list(joined.item_keys())
    assert [split.task(i).item for i in range(6)] == [joined.task(i).item for i in range(6)]


def test_a_row_is_named_with_its_file(folder: Path) -> None:
    write(folder / "part-2.jsonl", [{"prompt": "2/0", "answer": "0"}, {"prompt": 7, "answer": "0"}])
    (doubt, *_) = Dataset(path=str(folder)).doubts
    assert f"row 2 of {folder}/part-2.jsonl" in doubt
    write(folder / "part-2.jsonl", [{"prompt": "1/1", "answer": "7"}, {"prompt": "new", "answer": "0"}])
    (contradiction,) = Dataset(path=str(folder)).doubts
    assert f"rows 2 of {folder}/part-1.jsonl and 1 of {folder}/part-2.jsonl, '1' and '7'" in contradiction
    (folder / "part-10.jsonl").write_text('{"prompt": \n')
    with pytest.raises(ConfigError, match=r"part-10\.jsonl"):
        Dataset(path=str(folder))


@pytest.mark.parametrize(
    ("extra", "said"),
    [("rows.csv", "files of several kinds"), ("test-1.jsonl", "several splits")],
)
def test_a_folder_of_what_is_not_one_data_set_is_refused(folder: Path, extra: str, said: str) -> None:
    (folder / extra).write_text('{"prompt": "x", "answer": "y"}\n')
    with pytest.raises(ConfigError, match=said):
        Dataset(path=str(folder))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{0}/*.parquet", "no file has such a name"),
        (["{0}/part-1.jsonl", "{0}/part-1*.jsonl"], "part-1.jsonl twice"),
        ([], "is an empty list"),
        (["{0}/part-1.jsonl", "{0}/part-3.jsonl"], "part-3.jsonl: No such file"),
    ],
)
def test_files_that_are_not_there_are_named(folder: Path, path: str | list[str], said: str) -> None:
    given = path.format(folder) if isinstance(path, str) else [one.format(folder) for one in path]
    with pytest.raises(ConfigError, match=re.escape(said)):
        Dataset(path=given)


def test_files_of_a_list_are_relative_to_the_configuration(tmp_path: Path) -> None:
    env = {"kind": "dataset", "params": {"path": ["a.jsonl", "shards/*.jsonl"]}}
    found = resolve_paths(EnvironmentConfig, env, lambda _: tmp_path)
    assert found["params"]["path"] == [f"{tmp_path}/a.jsonl", f"{tmp_path}/shards/*.jsonl"]
    assert msgspec.convert(found, EnvironmentConfig).kind == "dataset"
