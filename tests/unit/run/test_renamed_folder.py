"""A run is found by its name, and by its folder's, after somebody renamed the folder."""

from pathlib import Path

import anyio
import pytest

from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.options import Options
from lachesis.services.run.known_runs import register_run
from lachesis.services.run.run_file import write_run_file


@pytest.fixture
def renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    before, after = tmp_path / "runs" / "before", tmp_path / "runs" / "after"
    before.mkdir(parents=True)
    config = RunConfig(run="before", folder=str(before), seed=7)
    anyio.run(write_run_file, config)
    register_run(config, None)
    before.rename(after)
    return after


@pytest.mark.parametrize("name", ["before", "after"])
def test_both_names_mean_the_run(renamed: Path, name: str) -> None:
    config = Options(run=name).config()
    assert (config.run, config.path, config.seed) == ("before", renamed, 7)


def test_its_name_finds_it_from_another_folder(renamed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert Options(run="before").config().path == renamed


def test_a_folder_of_the_name_goes_before_a_renamed_one(renamed: Path) -> None:
    other = renamed.parent / "before"
    other.mkdir()
    anyio.run(write_run_file, RunConfig(run="before", folder=str(other), seed=8))
    assert Options(run="before").config().seed == 8


def test_copies_of_a_run_are_named(renamed: Path) -> None:
    copy = renamed.parent / "copy"
    copy.mkdir()
    (copy / "run.toml").write_bytes((renamed / "run.toml").read_bytes())
    with pytest.raises(ConfigError, match=r"lies in 2 folders, none of which has its name"):
        Options(run="before").config()


def test_another_configuration_with_the_name_of_a_folder_begins_a_run_of_that_name(renamed: Path) -> None:
    file = renamed.parent.parent / "other.toml"
    file.write_text("seed = 9\n")
    assert Options(file=file, run="after").config().run == "after"


def test_a_folder_whose_configuration_is_nested_too_deeply_is_no_run(renamed: Path) -> None:
    other = renamed.parent / "other"
    other.mkdir()
    (other / "run.toml").write_text(f"# The configuration of run before\nx = {'[' * 5000}")
    assert Options(run="before").config().path == renamed
