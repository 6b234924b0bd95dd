"""The command line as a whole: help, version, errors and what gets imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from lachesis import __version__
from lachesis.schemas.asyncapi import documents
from lachesis.services.cli.commands import COMMANDS, load_command
from lachesis.services.registry import load_stage, services

pytestmark = pytest.mark.outside

HEAVY = ("torch", "transformers", "matplotlib", "wandb", "reasoning_gym")


def lachesis(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lachesis", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=cwd, check=False)


def imported_by(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


def test_version() -> None:
    assert lachesis("--version").stdout == f"lachesis {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    modules = imported_by("from lachesis.services.cli.commands import app")
    assert "lachesis.services.cli.commands" in modules
    assert modules.isdisjoint({*HEAVY, "numpy", "nats", "anyio", "msgspec", "lachesis.pipeline.config.run"})


def test_every_line_of_the_help_is_what_its_command_says() -> None:
    for command in COMMANDS.values():
        loaded = load_command(command)
        first = (loaded.help or "").partition("\n\n")[0]
        assert " ".join(first.split()) == command.help, command.name
        assert loaded.hidden == command.hidden


@pytest.mark.slow
def test_the_help_of_every_command_imports_nothing_heavy() -> None:
    code = "from lachesis.services.cli.commands import *\nfor command in COMMANDS.values(): load_command(command)"
    assert imported_by(code).isdisjoint(HEAVY)


@pytest.mark.parametrize("name", services())
def test_every_service_names_a_stage(name: str) -> None:
    assert callable(load_stage(services()[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["scorer", "environment", "governor", "batcher", "normalizer", "curriculum", "health", "teacher"]
)
def test_a_service_that_does_not_train_imports_nothing_heavy(name: str) -> None:
    code = f"import lachesis.services.cli.run\nfrom lachesis.services.registry import *\nload_stage(find({name!r}))"
    modules = imported_by(code)
    assert services()[name].stage.partition(":")[0] in modules
    assert modules.isdisjoint(HEAVY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "scorr"], "did you mean 'scorer'"),
        (["status", "--set", "nats.ur=x"], "did you mean 'nats.url'"),
        (["status", "--config", "none.toml"], "none.toml"),
        (["run", "scorer"], "no run is named, and none in"),
        (["status"], "no run is named, and none in"),
        (["status", "--run", "nope"], "there is no run nope in"),
        (["dead", "show", "nope"], "Invalid value for 'seq'"),
        (["statsu"], "Did you mean 'status'?"),
        (["trace"], "name a rollout, or give --follow; see `lachesis trace --help`"),
        (["replay", "--revision", "x"], "the configuration has no environments; give the run's with --config"),
        (["export", "x.jsonl"], "give the run's with --config"),
        (["import", "x.jsonl"], "give the run's with --config"),
        (["shadow", "start", "x"], "give the run's with --config"),
        (["promote", "x"], "the configuration has no environments; give the revision's with --config"),
        (["tail", "scores"], "nothing travels on 'scores'"),
        (["tail", "score", "--last", "1", "--since-start"], "give one of them"),
        (["schema", "--check"], "there is no folder deploy/schema"),
    ],
)
def test_expected_errors_are_one_line_and_exit_code_2(arguments: list[str], expected: str, tmp_path: Path) -> None:
    done = lachesis(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.slow
def test_run_without_a_name_lists_the_services() -> None:
    done = lachesis("run")
    assert done.returncode == 0
    assert "rates rollouts" in done.stdout


@pytest.mark.slow
def test_schema_writes_what_check_accepts_and_notices_every_change(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    assert lachesis("schema", "--out", str(folder)).returncode == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == documents()
    assert lachesis("schema", "--out", str(folder), "--check").returncode == 0
    (folder / "asyncapi.json").write_text("{}")
    (folder / "Old.schema.json").write_text("{}")
    (folder / "ScoreEvent.schema.json").unlink()
    done = lachesis("schema", "--out", str(folder), "--check")
    assert done.returncode == 1
    for text in ("different: ", "asyncapi.json", "left over: ", "Old.schema.json", "missing: ", "ScoreEvent"):
        assert text in done.stderr


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run.toml").write_text(
        'mode = "observe"\ninference.policy.url = "http://127.0.0.1:9"\n[environments.words]\nkind = "gateway"\n'
    )
    for folder in (tmp_path / "file" / "run", Path("/proc/none/run")):
        done = lachesis("up", "--config", str(tmp_path / "run.toml"), f"--set=folder={folder}")
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert str(folder) in done.stderr.splitlines()[-1]
        assert "choose another --set folder=DIR" in done.stderr


@pytest.mark.slow
def test_no_room_for_what_a_command_writes_is_one_line(tmp_path: Path) -> None:
    done = lachesis("schema", "--out", "/dev/full/x")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "/dev/full" in done.stderr
