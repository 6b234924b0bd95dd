"""`lachesis env atropos` adds the environment to the configuration of the run that it brings up."""

import sys

import pytest
from typer.testing import CliRunner

from lachesis.services.cli import up as up_module
from lachesis.services.cli.commands import app

RUN = """
model = "model"
[environments.words]
kind = "atropos"
samples = 4
longest_tokens = 96
max_new_tokens = 12
params = { settings = { kept = [1, {}], max_token_length = 64 } }
"""


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Return what the run would be brought up with, and the command's result."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "words.py").write_text("")
    (tmp_path / "model").mkdir()
    seen = []
    monkeypatch.setattr(up_module, "bring_up", lambda options: seen.append(options.config()))

    def run(*arguments):
        result = CliRunner().invoke(app, ["env", "atropos", *arguments, "--config", "run.toml"])
        return seen, result

    return run


@pytest.mark.extension
def test_it_joins_what_the_configuration_says_of_the_environment(invoke, tmp_path):
    seen, result = invoke(
        "words.py:Words", "--python", sys.executable, "--items", "40", "--setting", "max_token_length=96",
        "--setting", 'dataset="x=y"', "--set", "training.steps=3",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (config,) = seen
    assert config.training.steps == 3
    env = config.environments["words"]
    assert (env.kind, env.samples) == ("atropos", 4)
    assert env.params == {
        "place": f"{tmp_path / 'words.py'}:Words",
        "python": sys.executable,
        "items": 40,
        "settings": {
            "tokenizer_name": str(tmp_path / "model"),
            "max_token_length": 96,
            "dataset": "x=y",
            "kept": [1, {}],
        },
    }


def test_a_name_and_a_tokenizer_of_ones_own(invoke):
    seen, result = invoke("words.py:Words", "--name", "other", "--setting", "tokenizer_name=mine")
    assert result.exit_code == 0, result.output
    assert seen[0].environments["other"].params["settings"] == {"tokenizer_name": "mine"}


@pytest.mark.parametrize(
    ("arguments", "text"), [(["words"], "write MODULE:CLASS"), (["w:W", "--setting", "x"], "write KEY=VALUE")]
)
def test_what_is_no_class_and_no_setting_is_said(invoke, arguments, text):
    seen, result = invoke(*arguments)
    assert text in str(result.exception)
    assert not seen
