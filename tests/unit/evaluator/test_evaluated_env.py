"""Which environments are evaluated, and what is said of those that are not."""

import json
from pathlib import Path

import msgspec
import pytest

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.evaluator.evaluated_env import EvaluatedEnv, load_evaluated_env
from lachesis.services.stage_settings import evaluator_settings

pytestmark = pytest.mark.extension


def loaded(folder: Path, held_out: float) -> EvaluatedEnv:
    """Load an environment whose agents run elsewhere, and do not know of an evaluator."""
    (folder / "tasks.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Say {n}", "answer": n}) + "\n" for n in range(40))
    )
    params = {
        "path": str(folder / "tasks.jsonl"), "reward": "program", "port": 1, "token_file": str(folder / "token"),
    }  # fmt: skip
    run = {"run": "r", "environments": {"env": {"kind": "agent", "params": params}}, "evaluate": {"held_out": 0.25}}
    settings = evaluator_settings(msgspec.convert(run, RunConfig))
    return load_evaluated_env(settings.environments["env"], "env")


def test_an_environment_that_cannot_be_evaluated_here_says_why(tmp_path: Path) -> None:
    assert "set evaluation_port" in (loaded(tmp_path, 40).reason_without_tasks() or "")
