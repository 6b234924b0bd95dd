"""`lachesis env new`: what it writes passes its own tests and loads; nothing is overwritten."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.environment.load import load_environment
from lachesis.services.cli.environments import env_app


def new(*arguments: str) -> Result:
    return CliRunner().invoke(env_app, ["new", *arguments])


@pytest.mark.slow
@pytest.mark.outside
@pytest.mark.parametrize("kind", ["single", "tools", "dataset"])
def test_what_is_written_passes_its_tests_and_loads(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = new("my_sums", "--kind", kind)
    assert made.exit_code == 0, made.output
    assert "lachesis up --config my_sums.toml" in made.output
    config = load(run_config_type(), file=tmp_path / "my_sums.toml", environ={}, sets=["model=m", "run=r"]).config
    env = config.environments["my_sums"]
    assert len(load_environment(env.kind, env.params)) >= 20
    if kind != "dataset":
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_sums.py"]
        tested = subprocess.run(command, capture_output=True, text=True, check=False)
        assert tested.returncode == 0, tested.stdout


def test_nothing_is_overwritten_and_a_name_is_checked(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    assert f"cd '{folder}' && " in new("words", "--folder", str(folder)).output
    before = {path: path.read_text() for path in folder.iterdir()}
    assert "there already" in str(new("words", "--folder", str(folder), "--kind", "tools").exception)
    assert {path: path.read_text() for path in folder.iterdir()} == before
    for name in ("My-words", "class", "1st", ""):
        assert "small letters" in str(new(name, "--folder", str(tmp_path)).exception)
