import inspect
import itertools
from pathlib import Path

import pytest

from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.options import Options, with_options


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
    assert Options(file=file, run="demo").config().folder == "elsewhere"
    assert Options(sets=("folder=there",), run="demo").config().folder == "there"


def test_a_hostile_name_is_refused() -> None:
    for name in ("../x", "a.b", 'a"\nfolder="/', ""):
        with pytest.raises(ConfigError):
            Options(run=name).config()


def test_the_arguments_give_another_process_the_same_configuration(tmp_path: Path) -> None:
    file = tmp_path / "a run.toml"
    file.write_text("seed = 5\n")
    options = Options(file=file, sets=("revision=v2", "scoring.raters=[]"), nats="nats://h:1", run="demo")
    arguments = options.arguments()
    again = Options(
        file=Path(arguments[arguments.index("--config") + 1]),
        sets=tuple(b for a, b in itertools.pairwise(arguments) if a == "--set"),
        nats=arguments[arguments.index("--nats") + 1],
        run=arguments[arguments.index("--run") + 1],
    )
    assert again.config() == options.config()


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
    assert Options(run="demo").arguments() == ["--config", str(left), "--run", "demo"]
    assert Options(run="demo", file=other).config().seed == 8
    assert Options(run="another").config().seed == 0
