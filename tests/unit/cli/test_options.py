import inspect
import shutil
from pathlib import Path

import pytest

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.delete import delete_named
from lachesis.services.cli.options import Options, with_options
from lachesis.services.run.known_runs import register_run
from lachesis.services.run.run_file import write_run_file


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_sugar_sets_what_it_stands_for() -> None:
    config = Options(nats="nats://h:1", run="demo").config()
    assert config.run == "demo"
    assert config.path == Path("runs/demo").absolute()
    assert config.nats is not None
    assert config.nats.url == "nats://h:1"


@pytest.mark.parametrize("name", ["12", "true", "1e3"])
def test_a_name_that_looks_like_another_type_stays_a_name(name: str) -> None:
    assert Options(run=name).config().run == name


def test_a_folder_that_was_set_wins_over_the_one_of_the_name(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('folder = "elsewhere"\n')
    assert Options(file=file, run="demo").config().path == tmp_path / "elsewhere"
    assert Options(sets=("folder=there",), run="demo").config().path == Path("there").absolute()


def test_a_hostile_name_is_refused() -> None:
    for name in ("../x", "a.b", 'a"\nfolder="/', ""):
        with pytest.raises(ConfigError):
            Options(run=name).config()


def test_with_options_puts_the_shared_options_behind_the_commands_own() -> None:
    seen = []

    @with_options
    def command(options: Options, name: str, *, flag: bool = False) -> None:
        seen.append((options, name, flag))

    assert list(inspect.signature(command).parameters) == ["name", "flag", "config_file", "sets", "nats", "run_name"]
    command(name="x", flag=True, config_file=None, sets=["a=b"], nats=None, run_name="r")  # type: ignore[call-arg]
    assert seen == [(Options(None, ("a=b",), None, "r"), "x", True)]


def test_the_folder_follows_the_name_wherever_that_is_set(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('run = "mine"')
    options = Options(file=tmp_path / "run.toml")
    assert options.config().path == Path("runs/mine").absolute()
    assert Options(file=tmp_path / "run.toml", sets=("folder=elsewhere",)).config().path == Path("elsewhere").absolute()


def test_a_run_that_left_its_configuration_is_known_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    left, other = tmp_path / "runs" / "demo" / "run.toml", tmp_path / "other.toml"
    left.parent.mkdir(parents=True)
    left.write_text('run = "demo"\nseed = 7\n')
    other.write_text("seed = 8\n")
    assert Options(run="demo").config().seed == 7
    assert Options(run="demo").config().path == left.parent
    assert Options(run="demo", file=other).config().seed == 8
    assert Options(run="another").config().seed == 0


async def test_a_run_is_found_by_its_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = await _started(tmp_path / "one", "mine", seed=7)
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    found = Options(run="mine").config()
    assert (found.path, found.seed) == (tmp_path / "one/runs/mine", 7)
    assert Options(file=file).config().path == found.path  # requested as it was started, and not as a new run
    assert Options(file=tmp_path / "one/runs/mine/run.toml").config() == found
    monkeypatch.setenv("LACHESIS_RUN", "mine")
    assert Options().config() == found
    monkeypatch.delenv("LACHESIS_RUN")
    await _started(tmp_path / "default", "run", seed=1)
    assert Options().config() == run_config_type()()
    with pytest.raises(ConfigError, match="say which run: lachesis runs delete NAME"):
        delete_named(Options(), yes=True, as_json=False)

    other = tmp_path / "away" / "other.toml"
    other.write_text('run = "mine"\n')
    assert Options(file=other).config().path == tmp_path / "away/runs/mine"  # another one of the same name


async def test_of_several_runs_of_a_name_none_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for place in ("one", "two"):
        await _started(tmp_path / place, "mine", seed=7)
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    with pytest.raises(ConfigError, match=r"2 runs called 'mine': .*one/runs/mine, .*two/runs/mine"):
        Options(run="mine").config()
    monkeypatch.chdir(tmp_path / "two")
    assert Options(run="mine").config().path == tmp_path / "two/runs/mine"  # the one here
    shutil.rmtree(tmp_path / "two")
    monkeypatch.chdir(tmp_path / "away")
    assert Options(run="mine").config().path == tmp_path / "one/runs/mine"  # the only one that is left


async def _started(folder: Path, name: str, *, seed: int) -> Path:
    """Leave what `lachesis up` leaves of a run that was started in `folder`."""
    file = folder / "config.toml"
    (folder / "runs" / name).mkdir(parents=True)
    file.write_text(f'run = "{name}"\nseed = {seed}\n')
    config = RunConfig(run=name, seed=seed, folder=str(folder / "runs" / name))
    await write_run_file(config)
    register_run(config, file)
    return file


async def test_a_file_that_was_written_by_hand_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    by_hand = tmp_path / "runs" / "mine" / "run.toml"
    by_hand.parent.mkdir(parents=True)
    by_hand.write_text('run = "mine"\nfolder = "."\n# of mine\n')
    config = Options(file=by_hand, sets=("seed=3",)).config()
    for _ in range(2):
        assert await write_run_file(config) == by_hand.with_name("run.effective.toml")
    assert "# of mine" in by_hand.read_text()
    assert Options(run="mine").config() == config  # as it was started, --set included
    assert by_hand.with_name("run.effective.toml").stat().st_mode & 0o077 == 0
