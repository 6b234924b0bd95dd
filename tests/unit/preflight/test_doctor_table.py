"""Every kind of thing that a configuration can name, each broken and whole: `doctor` says OK of the whole one alone.

The kinds are read from the code, so a new kind without a row fails.
"""

import io
import json
import sys
import threading
import typing
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok, warn
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.curriculum.known_strategies import STRATEGIES
from lachesis.pipeline.environment import load as environments
from lachesis.pipeline.extension import added
from lachesis.pipeline.inference.engine_table import engines
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.normalizer.known_estimators import ESTIMATORS
from lachesis.pipeline.scorer.raters import rater_places
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.planned_processes import planned_processes
from lachesis.services.preflight.load_findings import LoadFinding
from lachesis.services.preflight.loading import write_findings
from lachesis.services.preflight.machine import check_machine
from lachesis.services.preflight.named_in_config import named_problems
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
from lachesis.pipeline.curriculum.logic.schedules import Pools as Even
"""

Changes = dict[str, Any]
Row = tuple[Changes | list[Changes], Changes]
"""The broken configurations, and the whole one. `HOST` in a text is the address of a server that answers."""
HOST = "http://host-of-the-test"
STUB = Path(__file__).parents[1] / "extensions" / "atropos" / "native" / "stub"
REGISTRY = """
class Game:
    def reset(self, seed=None): return "?", {}
    def step(self, action): return "", 1.0, True, False, {}
def make(name, **settings):
    if name != "game-v0": raise ValueError(f"{name} is not registered")
    settings.pop("disable_env_checker", None)
    return Game(**settings)
"""
"""Stands in for gem and Gymnasium: what a registry of theirs does with an id."""


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


WORDS = f"{STUB / 'words_env.py'}:Words"
AGENT = [sys.executable, str(Path(__file__).parents[1] / "extensions" / "endpoint" / "agent_program.py")]
ENVIRONMENTS: dict[str, Row] = {
    "agent": (
        [
            environment(kind="agent", params={"command": AGENT, "path": "none.jsonl"}),
            environment(kind="agent", params={"command": AGENT, "path": "rows.jsonl", "tasks": "mine.py:Asks"}),
            environment(kind="agent", params={"command": AGENT, "tasks": "mine.py:Ask"}),
            environment(kind="agent", params={"command": "none/agent", "path": "rows.jsonl"}),
            environment(kind="agent", params={"command": "no-such-program x", "path": "rows.jsonl"}),
            environment(kind="agent", params={"path": "rows.jsonl"}),
            environment(kind="agent", params={"command": AGENT, "path": "rows.jsonl", "max_calls": 0}),
        ],
        environment(kind="agent", params={"command": AGENT, "path": "rows.jsonl"}, samples=2),
    ),
    "atropos": (
        [
            environment(kind="atropos", params={"place": "no.py:X"}),
            environment(kind="atropos", params={"place": WORDS, "python": "/bin/false"}),
            environment(kind="atropos", params={"place": WORDS, "python": sys.executable, "settings": {"nothing": 1}}),
            environment(kind="atropos", params={"place": WORDS, "python": "none/python"}),
            environment(kind="atropos", params={"place": f"{WORDS}s", "python": sys.executable}),
            environment(
                kind="atropos", params={"place": WORDS, "python": sys.executable, "settings": {"how": "setup fails"}}
            ),
            environment(kind="atropos", params={"place": WORDS, "python": sys.executable, "setting": {}}),
        ],
        environment(kind="atropos", params={"place": WORDS, "python": sys.executable}, samples=2),
    ),
    "dataset": (
        [
            environment(kind="dataset", params={"path": "none.jsonl"}),
            environment(kind="dataset", params={"path": "rows.jsonl", "prompt": "question"}),
            environment(kind="dataset", params={"path": "mine.py"}),
            environment(kind="dataset", params={"paths": "rows.jsonl"}),
        ],
        environment(kind="dataset", params={"path": "rows.jsonl"}),
    ),
    **{
        kind: (
            [
                environment(kind=kind, params={"place": "none"}),
                environment(kind=kind, params={"place": "game-v0", "settings": {"largest": 5}}),
                environment(kind=kind, params={"place": "game-v0", "episodes": 0}),
                environment(kind=kind),
            ],
            environment(kind=kind, params={"place": "game-v0"}),
        )
        for kind in ("gem", "gymnasium")
    },
    "reasoning_gym": (
        [
            environment(kind="reasoning_gym", params={"dataset": "none"}),
            environment(kind="reasoning_gym", params={"dataset": "leg_counting", "sise": 4}),
            environment(kind="reasoning_gym", params={"dataset": "leg_counting", "size": 0}),
        ],
        environment(kind="reasoning_gym", params={"dataset": "leg_counting", "size": 4}),
    ),
    "spell_backward": (environment(kind="spell_backward", params={"size": 0}), environment(**SPELLING)),
    "steps": (
        [
            environment(kind="steps", params={"place": "mine.py:Nothing"}),
            environment(kind="steps", params={"place": "none.py:Steps"}),
            environment(kind="steps", params={"place": "mine.py:Steps", "settings": {"largest": 5}}),
            environment(kind="steps", params={"place": "mine.py:Asks"}),
        ],
        environment(kind="steps", params={"place": "mine.py:Steps"}),
    ),
    "your own": (
        [
            environment(kind="mine.py:Ask"),
            environment(kind="mine.py:Broken"),
            environment(kind="nothing_here:Asks"),
            environment(kind="mine.py:Asks", params={"largest": 5}),
        ],
        environment(kind="mine.py:Asks"),
    ),
}
HERE = {"url": f"{HOST}/v1", "model": "m"}
AWAY = {"url": "http://127.0.0.1:9", "model": "m"}
OF_RATERS: dict[str, Row] = {
    "code": (rater("code", params={"time_s": 0}), rater("code")),
    "exact_match": (rater("exact_match", params={"pattern": "("}), rater("exact_match")),
    "format": (rater("format", params={"pattern": "("}), rater("format", params={"finished": True})),
    "json_valid": (rater("json_valid", params={"schema": {"type": "number of"}}), rater("json_valid")),
    "llm_judge": (
        [
            rater("llm_judge", params={**AWAY, "rubric": "?"}, retries=0),
            rater("llm_judge", params={**HERE, "model": "other", "rubric": "?"}, retries=0),
            rater("llm_judge", params={**HERE, "rubric": "?", "key_env": "NO_KEY_OF_THIS_NAME"}, retries=0),
            rater("llm_judge", params={**HERE, "rubric": "?", "key_env": "WRONG_KEY"}, retries=0),
            rater("llm_judge", params={**HERE, "url": f"{HOST}/v2", "rubric": "?"}, retries=0),
            rater("llm_judge", params={**HERE, "rubrik": "?"}),
        ],
        rater("llm_judge", params={**HERE, "rubric": "?"}),
    ),
    "math": (rater("math", params={"workers": 0}), rater("math")),
    "pairwise_judge": (
        [
            rater("pairwise_judge", params={**AWAY, "rubric": "?"}, retries=0),
            rater("pairwise_judge", params={**HERE, "model": "other", "rubric": "?"}, retries=0),
            rater("pairwise_judge", params={**HERE, "rubric": "?", "rounds": 0}),
        ],
        rater("pairwise_judge", params={**HERE, "rubric": "?"}),
    ),
    "rubric_judge": (
        [
            rater("rubric_judge", params={**AWAY, "criteria": ["is right"]}, retries=0),
            rater("rubric_judge", params=HERE, retries=0),  # its tasks have no rubric
            rater("rubric_judge", params={**HERE, "criteria": [{"weight": 1}]}),
        ],
        rater("rubric_judge", params={**HERE, "criteria": ["is right"]}),
    ),
    "language": (rater("language", params={"expected": "German"}), rater("language")),
    "length": (rater("length", params={"ramp": 0}), rater("length")),
    "numeric": (rater("numeric", params={"pattern": "("}), rater("numeric")),
    "reasoning_gym": (
        rater("reasoning_gym"),  # its environment gives none of what it needs
        {
            **environment(kind="reasoning_gym", params={"dataset": "leg_counting", "size": 4}),
            "scoring": {"raters": [{"rater": "reasoning_gym"}]},
        },
    ),
    "repetition": (rater("repetition", params={"n": 0}), rater("repetition")),
    "reward_model": (
        [
            rater("reward_model", params={**AWAY, "route": "classify"}, retries=0),
            rater("reward_model", params={**HERE, "model": "other", "route": "classify"}, retries=0),
            rater("reward_model", params={**HERE, "route": "classify", "label": 7}, retries=0),
            rater("reward_model", params={**HERE, "route": "classifies"}, retries=0),
            rater("reward_model", params={**HERE, "url": "host"}),
        ],
        rater("reward_model", params={**HERE, "route": "classify"}),
    ),
    "similarity": (rater("similarity", params={"pattern": "[z-a]"}), rater("similarity")),
}
OF_ESTIMATORS: dict[str, Row] = {
    **{name: (estimator(name, params={"scale": 2}), estimator(name)) for name in ESTIMATORS},
    "your own": (estimator("mine.py:leads"), estimator("mine.py:lead")),
}
OF_STRATEGIES: dict[str, Row] = {
    **{name: (strategy(name + "s"), strategy(name)) for name in STRATEGIES},
    "your own": (
        [strategy("mine.py:Broken"), strategy("mine.py:Nothing"), strategy("none.py:Even")],
        strategy("mine.py:Even"),
    ),
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


def at_tinker(**settings: Any) -> Changes:
    named = {"base_model": "tiny", "url": HOST, **settings}
    return {**TRAINED, "training": {"backend": "tinker", "tinker": named}}


ENGINES: dict[str, Row] = {
    "reference": (served(model="./none"), served()),
    "vllm": (served(kind="vllm", python="/bin/false"), served(kind="vllm", python="./vllm-python")),
    "tinker": (
        [
            {**TRAINED, "model": "./none", "training": {"backend": "tinker"}},
            at_tinker(base_model="tinny"),
            at_tinker(base_model="old"),  # which it only samples
            at_tinker(url="http://127.0.0.1:9"),
            at_tinker(url=f"{HOST}/of-another-key"),
        ],
        at_tinker(),
    ),
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
    "wandb": (
        [
            {**TRAINED, "training": {"wandb": {"project": "a/b/c"}}},
            {**TRAINED, "training": {"wandb": {"project": "a", "entity": "b/c"}}},
            {**TRAINED, "training": {"wandb": {"project": "p" * 200}}},
        ],
        {**TRAINED, "training": {"wandb": {"project": "team/proj"}}},
    ),
    "tensorboard": (
        [
            {**TRAINED, "folder": "rows.jsonl/run", "training": {"tensorboard": True}},
            {**TRAINED, "folder": "with-a-file", "training": {"tensorboard": True}},
        ],
        {**TRAINED, "training": {"tensorboard": True}},
    ),
    "mlflow": (
        [
            {**TRAINED, "training": {"mlflow": {"uri": "nothing://here"}}},
            {**TRAINED, "training": {"mlflow": {"uri": "http://127.0.0.1:9"}}},
            {**TRAINED, "training": {"mlflow": {"uri": "sqlite:////nowhere/at/all.db"}}},
        ],
        {**TRAINED, "training": {"mlflow": {"uri": "file:mlruns"}}},
    ),
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
    monkeypatch.setenv("TINKER_API_KEY", "tml-right")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("WRONG_KEY", "wrong")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    (tmp_path / "with-a-file").mkdir()
    (tmp_path / "with-a-file" / "tensorboard").touch()
    for name in ("gem", "gymnasium"):
        (tmp_path / f"{name}.py").write_text(REGISTRY)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "2+2", "answer": "4"}\n')
    return tmp_path


class Answers(BaseHTTPRequestHandler):
    """A judge, a reward model and Tinker, each of one model and one key."""

    def do_GET(self) -> None:
        is_ours = not self.path.startswith("/of-another-key")
        models = [{"model_name": "tiny"}, {"model_name": "old", "trainable": False}]
        self._answer(200 if is_ours else 401, {"supported_models": models})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.headers.get("Authorization", "Bearer right") != "Bearer right":
            self._answer(401, {"error": "the key is not known"})
        elif asked.get("model") != "m":
            self._answer(404, {"error": "no such model"})
        elif self.path == "/v1/chat/completions":
            self._answer(200, {"choices": [{"message": {"content": '{"score": 5}, {"better": "A"}, {"1": 1}'}}]})
        elif self.path == "/v1/classify":
            self._answer(200, {"data": [{"probs": [0.5, 0.5]}]})
        else:
            self._answer(404, {"error": "no such path"})

    def _answer(self, status: int, said: Any) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def placed(changes: Changes, host: str) -> Changes:
    return json.loads(json.dumps(changes).replace(HOST, host))  # type: ignore[no-any-return]


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
            some = row[which] if isinstance(row[which], list) else [row[which]]
            for number, changes in enumerate(some):
                yield pytest.param(changes, id=f"{table} {name}{f' {number}' if number else ''}")


@pytest.mark.parametrize("table", [*OF_TABLES, *OF_MACHINE])
def test_every_kind_in_the_code_has_a_row(table: str) -> None:
    found, kinds = {**OF_TABLES, **OF_MACHINE}[table]
    assert set(found) == kinds


@pytest.mark.parametrize("changes", [*rows(0)])
def test_doctor_does_not_say_ok_of_what_cannot_work(changes: Changes, host: str) -> None:
    levels = [one for one in loaded(placed(changes, host)) if one.level != "OK"]
    assert levels
    assert any(one.level == "FAIL" or "not tried" in one.text or "a rating" in one.text for one in levels), levels


@pytest.mark.parametrize("changes", [*rows(1)])
def test_doctor_says_ok_of_what_works(changes: Changes, host: str) -> None:
    found = loaded(placed(changes, host))
    assert [one for one in found if one.level != "OK"] == []
    assert {"environments.e, tried", "environments.e.advantage", "curriculum.strategy"} <= {one.check for one in found}


def on_this_machine(changes: Changes) -> tuple[list[DoctorFinding], RunConfig | None]:
    try:
        config = msgspec.convert({"folder": "run", **changes}, run_config_type())
    except (ConfigError, msgspec.ValidationError) as error:
        return [fail("configuration", str(error), "-")], None
    return [*check_machine(config), *loaded({"mode": "train", **changes})], config


@pytest.mark.parametrize("changes", [*rows(0, OF_MACHINE)])
def test_doctor_does_not_say_ok_of_what_cannot_start(changes: Changes, host: str) -> None:
    found, _ = on_this_machine(placed(changes, host))
    assert [one for one in found if one.level == "FAIL" or (one.level == "WARN" and one.check.startswith("training."))]


@pytest.mark.parametrize("changes", [*rows(1, OF_MACHINE)])
def test_doctor_says_ok_of_what_starts(changes: Changes, host: str, request: pytest.FixtureRequest) -> None:
    found, config = on_this_machine(placed(changes, host))
    assert [one for one in found if one.level == "FAIL"] == []
    table, _, name = request.node.callspec.id.partition(" ")
    assert config is not None
    assert table != "service" or name in {row.service for row in planned_processes(config)}
