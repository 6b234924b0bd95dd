"""Paths in a configuration are relative to where they are written."""

import os
from pathlib import Path

import pytest

from lachesis.pipeline.common.paths import code_name, resolve_paths
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.loader import load_member
from lachesis.schemas.errors import ConfigError

TEXT = """
folder = "out"
model = "models/tiny"
nats.nkey_folder = "keys"
nats.ca_file = "/etc/ca.pem"
curriculum.strategy = "mine.py:Strategy"
gateway.token_file = "../token"
inference.teacher = {model = "org/name", python = "venv/bin/python"}
inference.eval = {python = "python3"}
[environments.words]
kind = "envs/words.py:Words"
params = {file = "stays.jsonl"}
[environments.rows]
kind = "dataset"
params = {path = "data/rows.jsonl", prompt = "question"}
[environments.chess]
kind = "atropos"
params = {place = "chess.py:Chess", python = "atropos/bin/python", items = 9}
[environments.steps]
kind = "steps"
params = {place = "games/steps.py:CountDown"}
[environments.agents]
kind = "agent"
params = {command = "python agent.py", tasks = "dataset", task_params = {path = ["data/rows.jsonl"]}}
[environments.functions]
kind = "agent"
params = {function = "agents:solve", path = "data/rows.jsonl", folder = "code"}
[environments.own]
kind = "package.module:Own"
params = {path = "v1/items"}
[environments.sums]
kind = "package.module:Sums"
scoring.raters = [{rater = "rate.py:half"}, {rater = "exact_match"}]
[[scoring.raters]]
rater = "rate.py:all"
"""


@pytest.mark.extension
def test_paths_of_a_file_are_relative_to_it_and_those_of_the_command_line_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    (home / "models/tiny").mkdir(parents=True)
    away.mkdir()
    monkeypatch.chdir(away)
    (home / "run.toml").write_text(TEXT)
    config = load(run_config_type(), file=Path("../home/run.toml")).config
    here = away / "../home"
    assert config.folder == str(here / "out")
    assert config.model == str(here / "models/tiny")
    assert config.nats is not None
    assert (config.nats.nkey_folder, config.nats.ca_file) == (str(here / "keys"), "/etc/ca.pem")
    assert config.curriculum.strategy == f"{here / 'mine.py'}:Strategy"
    assert config.gateway.token_file == str(here / "../token")
    assert config.role("teacher").model == "org/name"  # no folder of that name is there: an id
    assert config.role("teacher").python == str(here / "venv/bin/python")
    assert config.role("eval").python == "python3"
    assert config.environments["words"].kind == f"{here / 'envs/words.py'}:Words"
    assert config.environments["words"].params == {"file": "stays.jsonl"}  # what it means, the environment knows
    rows = str(here / "data/rows.jsonl")
    assert config.environments["rows"].params == {"path": rows, "prompt": "question"}
    chess = {"place": f"{here / 'chess.py'}:Chess", "python": str(here / "atropos/bin/python"), "items": 9}
    assert config.environments["chess"].params == chess
    assert config.environments["steps"].params == {"place": f"{here / 'games/steps.py'}:CountDown"}
    agents = {"command": "python agent.py", "folder": str(here), "tasks": "dataset", "task_params": {"path": [rows]}}
    assert config.environments["agents"].params == agents
    functions = config.environments["functions"].params
    assert (functions["folder"], functions["path"]) == (str(here / "code"), rows)
    assert config.environments["own"].params == {"path": "v1/items"}
    assert config.environments["sums"].kind == "package.module:Sums"
    assert [one.rater for one in config.scoring_of("sums").raters] == [f"{here / 'rate.py'}:half", "exact_match"]
    assert [one.rater for one in config.scoring.raters] == [f"{here / 'rate.py'}:all"]

    (away / "models").mkdir()
    environ = {"LACHESIS_NATS__CA_FILE": "ca.pem"}
    given = load(
        run_config_type(), file=home / "run.toml", environ=environ, sets=["model=models", "folder=~/out"]
    ).config
    assert (given.model, given.folder) == (str(away / "models"), str(Path.home() / "out"))
    sets = ["environments.rows.params.path=rows.jsonl"]
    for given_rows, place in (({"sets": sets}, away / "rows.jsonl"), ({"sets": ()}, home / "data/rows.jsonl")):
        found = load(run_config_type(), file=home / "run.toml", **given_rows).config.environments["rows"]
        assert found.params["path"] == str(place)
    assert given.nats is not None
    assert (given.nats.ca_file, given.nats.nkey_folder) == (str(away / "ca.pem"), str(home / "keys"))


def test_what_names_code_does_not_change_with_the_folder_that_it_lies_in(tmp_path: Path) -> None:
    assert code_name("/a/b/rate.py:half") == code_name("rate.py:half") == "rate.py:half"
    assert code_name("package.module:half") == "package.module:half"
    references = set()
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        (folder / "rate.py").write_text(
            "import lachesis\n\n@lachesis.rater(bounds=(0, 1))\ndef half(sample):\n    return 0.5\n"
        )
        (folder / "run.toml").write_text('[[scoring.raters]]\nrater = "rate.py:half"\n')
        raters = load(run_config_type(), file=folder / "run.toml").config.scoring.raters
        references.add(load_member(raters[0]).describe().reference)
    assert references == {"rate.py:half"}
    assert ScoringConfig(raters=[RaterConfig(rater="rate.py:half")]).raters[0].rater == "rate.py:half"


def test_a_template_is_a_file_or_its_own_text(tmp_path: Path) -> None:
    def resolved(template: str) -> str:
        tree = resolve_paths(run_config_type(), {"chat_template": template}, lambda _: tmp_path)
        return str(tree["chat_template"])

    assert resolved("mine.jinja") == str(tmp_path / "mine.jinja")
    assert resolved("{{ messages }}") == "{{ messages }}"


def test_a_home_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a number without an entry in /etc/passwd
    with pytest.raises(ConfigError, match=r"~/runs: this user \(uid \d+\) has no home folder: set HOME"):
        load(run_config_type(), sets=["folder=~/runs"])


@pytest.mark.parametrize("kind", [[], {}, 1, None])
def test_a_kind_that_is_no_text_is_left_for_the_check_of_types_to_refuse(kind: object, tmp_path: Path) -> None:
    tree = {"environments": {"s": {"kind": kind, "params": {"path": "a.jsonl"}}}}
    assert resolve_paths(run_config_type(), tree, lambda _: tmp_path) == tree
