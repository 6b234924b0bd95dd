"""`lachesis env agent`: one sample of a program on a random model, and what is printed when it does not stand."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lachesis.services.cli.commands import app

pytestmark = [pytest.mark.outside, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("agent_program.py")
FUNCTION = """
def broken(task):
    print("so far")
    raise KeyError("colour")
"""


def env_agent(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["env", "agent", *arguments])


def test_a_program_is_tried_as_one_sample_and_its_calls_and_tokens_are_shown() -> None:
    found = env_agent("--json", "--prompt", "Add.", "--", sys.executable, str(PROGRAM), "--team")
    assert found.exit_code == 0, found.output
    report = json.loads(found.output)
    assert len(report["calls"]) == 5
    assert report["trained_tokens"] == sum(call["tokens"] for call in report["calls"])
    assert (report["sequences"], report["problem"], report["rewards"]) == (4, None, {})
    assert report["agent"]["output"].startswith("the agent said")
    shown = env_agent("--", sys.executable, str(PROGRAM)).output
    assert "a random one answers" in shown
    assert "reward: none was reported" in shown
    assert "its output ends:\nthe agent said" in shown


def test_what_is_wrong_is_printed_and_is_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(FUNCTION)
    found = env_agent("--function", f"{tmp_path / 'agent.py'}:broken")
    assert found.exit_code == 1
    assert "it has not called the model" in found.output
    assert "so far" in found.output
    assert "KeyError: 'colour'" in found.output


def test_files_of_a_command_are_found_beside_the_configuration_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    monkeypatch.chdir(away)
    (home / "agent.py").write_text(PROGRAM.read_text())
    (home / "tasks.jsonl").write_text('{"prompt": "Add.", "answer": "7"}\n')
    params = f'params = {{command = ["{sys.executable}", "agent.py"], path = "tasks.jsonl"}}'
    (home / "run.toml").write_text(f'[environments.sums]\nkind = "agent"\n{params}\n')
    found = env_agent("--config", "../home/run.toml", "--env", "sums")
    assert found.exit_code == 0, found.output
    assert "WARNING" not in found.output
    (home / "agent.py").unlink()
    found = env_agent("--config", "../home/run.toml", "--env", "sums")
    assert found.exit_code == 1
    assert f"WARNING: command names 'agent.py', and there is no such file in {away / '../home'}" in found.output


@pytest.mark.parametrize("arguments", [[], ["--function", "a:b", "--", "x"], ["--env", "none"]])
def test_which_agent_must_be_clear(arguments: list[str]) -> None:
    found = env_agent(*arguments)
    assert found.exit_code != 0
    assert "name one agent" in str(found.exception) or "environments.none" in str(found.exception)
