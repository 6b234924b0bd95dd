"""`lachesis up` looks for what its configuration names before it starts anything."""

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.model import source
from lachesis.schemas.errors import ConfigError
from lachesis.services.preflight.named_in_config import check_named

HUB_MODEL = "org/name-1.5B"
ENV = """
import os
from lachesis import Environment
if os.name:
    class Sums(Environment): ...
LIMIT: int = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sums.py").write_text(ENV)
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "raters.py").write_text("def brief(sample): ...\nraise SystemExit('imported')")
    (package / "hidden.py").write_text("def __getattr__(name): ...")
    (tmp_path / "model").mkdir()
    for name, text in (
        ("config.json", '{"model_type": "llama"}'),
        ("model.safetensors", "\x02\0\0\0\0\0\0\0{}"),
        ("tokenizer.json", ""),
    ):
        (tmp_path / "model" / name).write_text(text)
    monkeypatch.setattr(source, "check_hub", lambda _, name, __: "there" if name == HUB_MODEL else "absent")
    return tmp_path


def config(**changes: Any) -> RunConfig:
    settings = {"model": "model", "environments": {"sums": {"kind": "sums.py:Sums"}}, **changes}
    return msgspec.convert(settings, run_config_type())


def rated(*references: str) -> RunConfig:
    return config(scoring={"raters": [{"rater": reference} for reference in references]})


@pytest.mark.extension
@pytest.mark.parametrize(
    "good",
    [
        config(),
        config(model=HUB_MODEL),
        config(environments={"a": {"kind": "gateway"}, "b": {"kind": "mine.hidden:Whatever"}}),
        rated("repetition", "mine.raters:brief", "json:dumps", "lachesis.pipeline.scorer.raters.code:CodeRater"),
        config(model=None, mode="observe", inference={"policy": {"url": "http://h:1", "model": "./served"}}),
    ],
)
def test_what_is_there_is_found_and_not_imported(good: RunConfig) -> None:
    check_named(good)
    assert "mine" not in sys.modules
    assert "sums" not in sys.modules


@pytest.mark.extension
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (config(model="runs/demo-NAME/model"), "model: there is no folder 'runs/demo-NAME/model'"),
        (config(model="./modle"), "model: there is no folder './modle'; did you mean 'model'?"),
        (config(model="org/name-1.6B"), "model: there is no folder 'org/name-1.6B', and https://huggingface.co has no"),
        (config(curriculum={"strategy": "unifrom"}), "curriculum.strategy: 'unifrom' is no built-in one; did you mean"),
        (config(curriculum={"strategy": "sums.py:Easy"}), "curriculum.strategy: sums.py has no 'Easy'"),
        (config(advantage={"estimator": "sums.py:lead"}), "advantage.estimator: sums.py has no 'lead'"),
        (
            config(environments={"a": {"kind": "sums.py:Sums", "advantage": {"estimator": "sum.py:lead"}}}),
            "environments.a.advantage.estimator: there is no file 'sum.py'",
        ),
        (config(model="mine"), "model: the folder 'mine' holds no model: it has no config.json"),
        (config(model="sums.py"), "model: there is no folder 'sums.py'"),
        (config(model=None), "model: not set"),
        (config(inference={"teacher": {"model": "/none"}}), "inference.teacher.model: there is no folder '/none'"),
        (config(environments={"a": {"kind": "sum.py:Sums"}}), "environments.a.kind: there is no file 'sum.py'"),
        (
            config(environments={"a": {"kind": "sums.py:Sms"}}),
            "environments.a.kind: sums.py has no 'Sms'; did you mean",
        ),
        (config(environments={"a": {"kind": "reasoning_gim"}}), "did you mean 'reasoning_gym'"),
        (config(evaluation={"a": {"kind": "nowhere.at.all:X"}}), "evaluation.a.kind: there is no module 'nowhere.at"),
        (rated("repetition", "repetitoin"), "scoring.raters[1].rater: 'repetitoin' is no built-in one; did you mean"),
        (rated("mine.raters:brif"), "scoring.raters[0].rater: mine.raters has no 'brif'; did you mean 'brief'"),
        (rated("mine.rators:brief"), "there is no module 'mine.rators'"),
        (
            config(environments={"a": {"kind": "sums.py:Sums", "scoring": {"raters": [{"rater": "x"}]}}}),
            "environments.a.scoring.raters[0].rater: 'x' is no built-in one",
        ),
    ],
)
def test_what_is_not_there_is_named_with_its_setting(bad: RunConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_named(bad)
    assert "mine" not in sys.modules


def test_everything_missing_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        check_named(config(model="./a", environments={"a": {"kind": "b.py:B"}}, scoring={"raters": [{"rater": "c"}]}))
    assert str(raised.value).count(";") >= 2
    assert all(f"{name!r}" in str(raised.value) for name in ("./a", "b.py", "c"))
