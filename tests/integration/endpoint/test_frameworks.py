"""Two frameworks, unmodified, as agents: openai-agents 0.24.0 and smolagents 1.26.0, where they are installed.

They are no packages of this project's development. `LACHESIS_FRAMEWORKS_PYTHON` names an interpreter that has them,
by `pip install openai-agents==0.24.0 'smolagents[openai]==1.26.0'`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.rollout import collect_group
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.testing import FakeInference

pytestmark = [pytest.mark.slow, pytest.mark.extension]

PYTHON = os.environ.get("LACHESIS_FRAMEWORKS_PYTHON", sys.executable)
PROGRAM = Path(__file__).with_name("framework_agents.py")


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def with_openai_agents(prompt: str, number: int) -> str:
    return "it is 5" if "<tool>" in prompt.rsplit("<user>", maxsplit=1)[-1] else call("add", a=2, b=3)


def with_smolagents(prompt: str, number: int) -> str:
    """Call the tool, and then that by which its agents answer: what a tool returns is an observation to them."""
    asked = prompt.rsplit("<user>", maxsplit=1)[-1]
    return call("final_answer", answer="5") if "Observation" in asked else call("add", a=2, b=3)


def is_installed(module: str) -> bool:
    return subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "module", "reply", "calls"),
    [("openai-agents", "agents", with_openai_agents, 6), ("smolagents", "smolagents", with_smolagents, 2)],
)
async def test_an_agent_of_a_framework_is_trained_on_all_that_was_sampled(
    name: str, module: str, reply: object, calls: int, tmp_path: Path
) -> None:
    if not is_installed(module):
        pytest.skip(f"{name} is not installed for {PYTHON}; LACHESIS_FRAMEWORKS_PYTHON names another interpreter")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": "What is 2 + 3?", "answer": "5"}) + "\n")
    params = {
        "path": str(tasks),
        "command": [PYTHON, str(PROGRAM), name],
        "reward": "program",
        "time_limit_s": 250.0,
    }
    env = load_environment("agent", params)
    async with env.running():
        inference = FakeInference(reply)  # type: ignore[arg-type]
        draft = await collect_group(env, env.task(0), inference, 2, SamplingParams(max_tokens=300))
    assert draft.rewards == [{"right": 1.0}] * 2
    for session in draft.sessions:
        assert session.notes["calls"] == {"all": calls, "trained": calls}
        trained = [token for one in session.sequences for token, mask in zip(one.tokens, one.loss_mask) if mask]  # noqa: B905
        assert FakeInference.show(trained).count("<end>") == calls
