"""Every kind of thing that a configuration can name, each broken and whole: `doctor` says OK of the whole one alone.

The kinds are read from the code, so a new kind without a row fails.
"""

import io
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok, warn
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.curriculum.logic.registry import STRATEGIES
from lachesis.pipeline.environment import load as environments
from lachesis.pipeline.extension import added
from lachesis.pipeline.inference.config import engines
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.normalizer.estimators.registry import BUILTIN as ESTIMATORS
from lachesis.pipeline.scorer.raters import rater_places
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.planned_processes import planned_processes
from lachesis.services.preflight.loading import LoadFinding, write_findings
from lachesis.services.preflight.machine import check_machine
from lachesis.services.preflight.named import named_problems
from lachesis.services.registry import services

pytestmark = pytest.mark.outside

SPELLING = {"kind": "spell_backward", "params": {"size": 4, "own_reward": True}}
CODE = """
from lachesis import Environment, Message, Task
class Asks(Environment):
    def __len__(self): return 2
    def task(self, index):
        return Task(item=str(index), prompt=[Message(role="user", content="?")], task={"answer": "1"})
class Steps:
    def reset(self, seed=None): return "?", {}
    def step(self, action): return "", 1.0, True, False, {}
class Broken:
    def __init__(self, pool, config): raise RuntimeError("no licence")
def lead(group): return [0.0] * len(group.rewards)
"""

Changes = dict[str, Any]
Row = tuple[Changes | None, Changes | None]
"""The broken configuration, and the whole one. None: the kind cannot be had here, or has nothing that could break."""


def _choices(of: type, field: str) -> tuple[str, ...]:
    return typing.get_args(typing.get_type_hints(of)[field])


def environment(**settings: Any) -> Changes:
    return {"environments": {"e": settings}, "scoring": {"raters": [{"rater": "exact_match"}]}}


def rater(name: str, **settings: Any) -> Changes:
    return {"environments": {"e": SPELLING}, "scoring": {"raters": [{"rater": name, **settings}]}}


def estimator(name: str, **settings: Any) -> Changes:
    return {"environments": {"e": SPELLING}, "advantage": {"estimator": name, **settings}}


def strategy(name: str, **settings: Any) -> Changes:
    return {"environments": {"e": SPELLING}, "curriculum": {"strategy": name, **settings}}


ENVIRONMENTS: dict[str, Row] = {
    "atropos": (environment(kind="atropos", params={"place": "no.py:X"}), None),  # a whole one needs atroposlib
    "dataset": (
        environment(kind="dataset", params={"path": "none.jsonl"}),
        environment(kind="dataset", params={"path": "rows.jsonl"}),
    ),
    "gem": (environment(kind="gem", params={"place": "none"}), None),
    "gymnasium": (environment(kind="gymnasium", params={"place": "None-v0"}), None),
    "reasoning_gym": (
        environment(kind="reasoning_gym", params={"dataset": "none"}),
        environment(kind="reasoning_gym", params={"dataset": "leg_counting", "size": 4}),
    ),
    "spell_backward": (environment(kind="spell_backward", params={"size": 0}), environment(**SPELLING)),
    "steps": (
        environment(kind="steps", params={"place": "mine.py:Nothing"}),
        environment(kind="steps", params={"place": "mine.py:Steps"}),
    ),
    "your own": (environment(kind="mine.py:Ask"), environment(kind="mine.py:Asks")),
}
AWAY = {"url": "http://127.0.0.1:9", "model": "m"}
OF_RATERS: dict[str, Row] = {
    "code": (rater("code", params={"time_s": 0}), rater("code")),
    "exact_match": (rater("exact_match", params={"pattern": "("}), rater("exact_match")),
    "format": (rater("format", params={"pattern": "("}), rater("format", params={"finished": True})),
    "json_valid": (rater("json_valid", params={"schema": {"type": "number of"}}), rater("json_valid")),
    "llm_judge": (rater("llm_judge", params={**AWAY, "rubric": "?"}, retries=0), None),
    "math": (rater("math", params={"workers": 0}), rater("math")),
    "length": (rater("length", params={"ramp": 0}), rater("length")),
    "numeric": (rater("numeric", params={"pattern": "("}), None),
    "reasoning_gym": (
        rater("reasoning_gym"),  # its environment gives none of what it needs
        {
            **environment(kind="reasoning_gym", params={"dataset": "leg_counting", "size": 4}),
            "scoring": {"raters": [{"rater": "reasoning_gym"}]},
        },
    ),
    "repetition": (rater("repetition", params={"n": 0}), rater("repetition")),
    "reward_model": (rater("reward_model", params={**AWAY, "route": "classify"}, retries=0), None),
    "similarity": (rater("similarity", params={"pattern": "[z-a]"}), rater("similarity")),
}
OF_ESTIMATORS: dict[str, Row] = {
    **{name: (estimator(name, params={"scale": 2}), estimator(name)) for name in ESTIMATORS},
    "your own": (estimator("mine.py:leads"), estimator("mine.py:lead")),
}
OF_STRATEGIES: dict[str, Row] = {
    **{name: (strategy(name + "s"), strategy(name)) for name in STRATEGIES},
    "your own": (strategy("mine.py:Broken"), None),
}
OF_TABLES = {
    "environment": (ENVIRONMENTS, {*environments.environment_kinds(), "your own"}),
    "rater": (OF_RATERS, set(rater_places())),
    "estimator": (OF_ESTIMATORS, {*ESTIMATORS, "your own"}),
    "strategy": (OF_STRATEGIES, {*STRATEGIES, "your own"}),
}


TRAINED = {"mode": "train", "model": "model", "environments": {"e": SPELLING}}
TEACHER = {"teacher": {"enabled": True}}


def served(role: str = "policy", **settings: Any) -> Changes:
    return {**TRAINED, "inference": {role: settings}}


ENGINES: dict[str, Row] = {
    "reference": (served(model="./none"), served()),
    "vllm": (served(kind="vllm", python="/bin/false"), served(kind="vllm", python="./vllm-python")),
    "tinker": ({**TRAINED, "model": "./none", "training": {"backend": "tinker"}}, None),
}
TRANSPORTS: dict[str, Row] = {
    "files": ({**TRAINED, "folder": "rows.jsonl/run"}, {**TRAINED, "weights": {"transport": "files"}}),
    "nats": (
        {**TRAINED, "weights": {"transport": "nats"}},
        {**TRAINED, "weights": {"transport": "nats"}, "streams": {"weights_bytes": 1 << 30}},
    ),
    "shared_memory": (
        {**served(url="http://127.0.0.1:9"), "weights": {"transport": "shared_memory"}},
        {**TRAINED, "weights": {"transport": "shared_memory"}},
    ),
}
TRACKERS: dict[str, Row] = {
    "wandb": ({**TRAINED, "training": {"wandb": {"project": "a/b/c"}}}, None),
    "tensorboard": ({**TRAINED, "folder": "rows.jsonl/run", "training": {"tensorboard": True}}, None),
    "mlflow": ({**TRAINED, "training": {"mlflow": {"uri": "nothing://here"}}}, None),
}
OF_SERVICES: dict[str, Row] = {
    "governor": ({**TRAINED, "streams": {"rollouts_bytes": 1 << 20}}, TRAINED),
    "batcher": ({**TRAINED, "batching": {"batch_size": 0}}, TRAINED),
    "normalizer": ({**TRAINED, "advantage": {"estimator": "grop"}}, TRAINED),
    "curriculum": ({**TRAINED, "curriculum": {"strategy": "irtt"}}, TRAINED),
    "health": ({**TRAINED, "health": {"webhook_file": "none"}}, TRAINED),
    "scorer": ({**TRAINED, "scoring": {"raters": [{"rater": "exact"}]}}, TRAINED),
    "teacher": ({**served("teacher", model="./none"), **TEACHER}, {**TRAINED, **TEACHER}),
    "inference": (served(model="./none"), TRAINED),
    "trainer": ({**TRAINED, "model": "./none"}, TRAINED),
    "evaluator": (
        {**TRAINED, "evaluation": {"v": {"kind": "spell_backwards"}}},
        {**TRAINED, "evaluation": {"v": SPELLING}},
    ),
    "gateway": (
        {**TRAINED, "environments": {"e": {"kind": "gateway"}}, "gateway": {"host": "198.51.100.1", "port": 9000}},
        {**TRAINED, "environments": {"e": {"kind": "gateway"}}},
    ),
    "environment": ({**TRAINED, "environments": {"e": {"kind": "spel_backward"}}}, TRAINED),
}
OF_MACHINE = {
    "engine": (ENGINES, {*engines(), *added("trainers")}),
    "transport": (TRANSPORTS, set(_choices(WeightsConfig, "transport"))),
    "tracker": (TRACKERS, {setting.rpartition(".")[2] for setting in added("trackers")}),
    "service": (OF_SERVICES, set(services())),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    save_policy(build_tiny_policy(0, width=16, layers=1, heads=2, max_length=64), tmp_path / "model")
    python = tmp_path / "vllm-python"
    python.write_text("#!/bin/sh\necho 0.32.1\n")
    python.chmod(0o755)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "2+2", "answer": "4"}\n')
    return tmp_path


def loaded(changes: Changes) -> list[DoctorFinding]:
    """Return what `doctor` finds of the code that a configuration names, in this process."""
    try:
        config = msgspec.convert({"mode": "observe", "folder": "run", **changes}, run_config_type())
    except (ConfigError, msgspec.ValidationError) as error:
        return [fail("configuration", str(error), "-")]
    out = io.BytesIO()
    write_findings(config, out)
    of_state: dict[str, Callable[[str, str], DoctorFinding]] = {
        "ok": ok,
        "failed": lambda check, text: fail(check, text, "-"),
        "doubtful": lambda check, text: warn(check, text, "-"),
    }
    lines = [msgspec.json.decode(line, type=LoadFinding) for line in out.getvalue().splitlines()]
    found = [of_state[line.state](line.setting, line.text) for line in lines if line.state != "begun"]
    return [*found, *(fail(one.setting, one.text, one.mend) for one in named_problems(config))]


def rows(which: int, tables: Any = OF_TABLES) -> Iterator[Any]:
    for table, (found, _) in tables.items():
        for name, row in found.items():
            if row[which] is not None:
                yield pytest.param(row[which], id=f"{table} {name}")


@pytest.mark.parametrize("table", [*OF_TABLES, *OF_MACHINE])
def test_every_kind_in_the_code_has_a_row(table: str) -> None:
    found, kinds = {**OF_TABLES, **OF_MACHINE}[table]
    assert set(found) == kinds


@pytest.mark.parametrize("changes", [*rows(0)])
def test_doctor_does_not_say_ok_of_what_cannot_work(changes: Changes) -> None:
    levels = [one for one in loaded(changes) if one.level != "OK"]
    assert levels
    assert any(one.level == "FAIL" or "not tried" in one.text or "a rating" in one.text for one in levels), levels


@pytest.mark.parametrize("changes", [*rows(1)])
def test_doctor_says_ok_of_what_works(changes: Changes) -> None:
    found = loaded(changes)
    assert [one for one in found if one.level != "OK"] == []
    assert {"environments.e, tried", "environments.e.advantage", "curriculum.strategy"} <= {one.check for one in found}


def on_this_machine(changes: Changes) -> tuple[list[DoctorFinding], RunConfig | None]:
    try:
        config = msgspec.convert({"folder": "run", **changes}, run_config_type())
    except (ConfigError, msgspec.ValidationError) as error:
        return [fail("configuration", str(error), "-")], None
    return [*check_machine(config), *loaded({"mode": "train", **changes})], config


@pytest.mark.parametrize("changes", [*rows(0, OF_MACHINE)])
def test_doctor_does_not_say_ok_of_what_cannot_start(changes: Changes) -> None:
    found, _ = on_this_machine(changes)
    assert [one for one in found if one.level == "FAIL" or (one.level == "WARN" and one.check.startswith("training."))]


@pytest.mark.parametrize("changes", [*rows(1, OF_MACHINE)])
def test_doctor_says_ok_of_what_starts(changes: Changes, request: pytest.FixtureRequest) -> None:
    found, config = on_this_machine(changes)
    assert [one for one in found if one.level == "FAIL"] == []
    table, _, name = request.node.callspec.id.partition(" ")
    assert config is not None
    assert table != "service" or name in {row.service for row in planned_processes(config)}
