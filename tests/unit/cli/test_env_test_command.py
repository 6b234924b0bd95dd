"""`lachesis env test` over real HTTP: the reference server, used as itself and as a foreign text-only server."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import uvicorn
from click.testing import Result
from typer.testing import CliRunner

from lachesis.pipeline.inference.config import EngineConfig
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.services.cli.environments import env_app

pytestmark = pytest.mark.outside

ENVIRONMENT = """
from lachesis import Environment, Task


class Short(Environment):
    max_turns = 2

    def __len__(self):
        return 2

    def task(self, index):
        return Task(item=str(index), prompt=f"say {index}")

    def respond(self, task, session, reply):
        return ["and?"]

    def reward(self, task, session):
        return float(len(session.replies))


class Broken(Short):
    def reward(self, task, session):
        raise KeyError("answer")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_policy(build_tiny_policy(0, width=16, layers=1), folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    policy = build_tiny_policy(0, width=16, layers=1)
    decode = partial(policy.tokenizer.decode, skip_special_tokens=True)
    eos, config = policy.tokenizer.eos_token_id, EngineConfig()
    with Engine(policy.model, eos_token_id=eos, weight_version="1-m-00", config=config, decode=decode) as engine:
        app = build_app(policy, engine, model_name="tiny", weights_folder=tmp_path_factory.mktemp("w"))
        with uvicorn.Config(app, port=0, log_level="warning").bind_socket() as listener:
            served = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
            thread = Thread(target=served.run, kwargs={"sockets": [listener]})
            thread.start()
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            served.should_exit = True
            thread.join()


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.py").write_text(ENVIRONMENT)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(env_app, ["test", *arguments])


def played(*arguments: str) -> tuple[int, dict[str, dict[str, object]], list[dict[str, object]]]:
    """Return the exit code, the table's rows by model, and the samples of one call."""
    result = call(*arguments, "--steps", "2", "--samples", "3", "--max-new-tokens", "4")
    assert isinstance(result.exception, SystemExit | None), result.exception
    (report,) = Path("inference_tests").glob("*.json")
    (lines,) = Path("inference_tests").glob("*.jsonl")
    samples = [json.loads(line) for line in lines.read_text().splitlines()]
    return result.exit_code, {row["model"]: row for row in json.loads(report.read_text())["models"]}, samples


def test_models_side_by_side_and_one_that_is_not_served(server: str) -> None:
    code, rows, samples = played("short.py:Short", "--server", f"{server}/v1", "--model", "tiny", "--model", "nobody")
    assert code == 1, "a model gave no answer at all"
    assert rows["tiny"]["outcomes"] == {"scored": 6}
    cut = [one["tokens"] for one in samples if one["turns"] == 1 and one["finish_reason"] == "length"]
    assert set(cut) == {4}, "as the server counts them, not by letters"
    assert rows["nobody"]["outcomes"] == {"request_refused": 6}
    assert rows["nobody"]["reward_mean"] is None
    assert any("not served here" in text for text in rows["nobody"]["errors"])  # type: ignore[attr-defined]
    assert len(samples) == 12
    said = samples[0]["messages"]
    assert [message["role"] for message in said][:2] == ["user", "assistant"]  # type: ignore[attr-defined,index]


def test_the_server_of_a_run_and_a_local_model(server: str, folder: Path) -> None:
    run = Path("runs/first/inference")
    run.mkdir(parents=True)
    (run / "policy.url").write_text(server)
    code, rows, _ = played("short.py:Short", "--run", "first", "--folder", str(folder))
    assert code == 0
    assert [row["outcomes"] for row in rows.values()] == [{"scored": 6}, {"scored": 6}]
    assert list(rows) == ["first/policy", str(folder)]


def test_an_environment_of_a_configuration_is_judged_by_its_raters(server: str) -> None:
    Path("run.toml").write_text(
        '[environments.words]\nkind = "spell_backward"\n[scoring]\nraters = [{ rater = "exact_match" }]\n'
    )
    code, rows, _ = played("--config", "run.toml", "--env", "words", "--server", f"{server}/v1")
    assert code == 0
    assert rows["tiny"]["outcomes"] == {"scored": 6}
    assert rows["tiny"]["reward_mean"] == 0


def test_a_server_that_is_away_is_counted_apart_and_is_no_reward() -> None:
    code, rows, _ = played("short.py:Short", "--server", "http://127.0.0.1:1/v1", "--model", "tiny")
    assert code == 1
    assert rows["tiny"]["outcomes"] == {"request_failed": 6}
    assert (rows["tiny"]["reward_mean"], rows["tiny"]["latency_p50_s"]) == (None, None)
    assert "ConnectError" in str(rows["tiny"]["errors"])


def test_a_bug_of_the_environment_is_no_reward(server: str) -> None:
    code, rows, samples = played("short.py:Broken", "--server", f"{server}/v1")
    assert code == 1
    assert rows["tiny"]["outcomes"] == {"environment_bug": 6}
    assert "KeyError" in str(samples[0]["error"])


def test_without_rewards_it_says_that_raters_are_missing(server: str) -> None:
    code, rows, _ = played("spell_backward", "--server", f"{server}/v1")
    assert code == 0
    assert rows["tiny"]["outcomes"] == {"unscored": 6}
    assert "leaves rewards to raters" in str(rows["tiny"]["errors"])


def test_a_missing_key_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    missing = call("short.py:Short", "--server", "openrouter").exception
    assert "the environment variable OPENROUTER_API_KEY holds no key" in str(missing)
    assert not Path("inference_tests").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["short.py:Short"], "no model to ask"),
        (["short.py:Short", "--run", "none"], "once `lachesis up` runs"),
        (["short.py:Short", "--folder", "none", "--model", "m"], "add --server URL"),
        (["short.py:Short", "--server", "somewhere"], "give http://HOST:PORT/v1"),
        (["--server", "http://127.0.0.1:1/v1"], "name one environment"),
    ],
)
def test_a_wrong_call_says_what_to_give(arguments: list[str], text: str) -> None:
    assert text in str(call(*arguments).exception)
