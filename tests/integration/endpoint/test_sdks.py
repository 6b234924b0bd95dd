"""The official SDKs, unmodified, as agents: three dialects, streams, tools, retries, errors by name."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.rollout import collect_group
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.errors import DataError
from lachesis.testing import FakeInference

pytestmark = [pytest.mark.slow, pytest.mark.extension]

AGENTS = Path(__file__).with_name("sdk_agents.py")


def reply(prompt: str, call: int) -> str:
    asked = prompt.rsplit("<user>", maxsplit=1)[-1]
    if "<tool>" in asked:
        return "it is 3"
    if asked.startswith("tool"):
        return '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    return "<think>so</think>\n\nwell" if asked.startswith("two") else "yes"


class Unconstrained(FakeInference):
    """Makes no answer match anything, as the reference server."""

    async def generate(
        self, prompt_ids: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        if sampling is not None and sampling.structured_outputs is not None:
            raise DataError("structured_outputs (response_format, or a forced tool_choice): not constrained")
        return await super().generate(prompt_ids, n, sampling)


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_an_agent_over_an_official_sdk_is_one_recorded_sequence(dialect: str, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": "?", "answer": "3"}) + "\n")
    params: dict[str, Any] = {
        "path": str(tasks),
        "command": [sys.executable, str(AGENTS), dialect],
        "reward": "program",
        "time_limit_s": 250.0,
    }
    env = load_environment("agent", params)
    inference = Unconstrained(reply)
    async with env.running():
        draft = await collect_group(env, env.task(0), inference, 2, SamplingParams(max_tokens=300))
    assert draft.rewards == [{"right": 1.0}] * 2
    for session in draft.sessions:
        assert session.notes["calls"] == {"all": 4, "trained": 4}
        own = FakeInference.show([t for t, mask in zip(session.tokens, session.loss_mask, strict=True) if mask])
        call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        assert own == f"yes<end><think>so</think>\n\nwell<end>{call}<end>it is 3<end>"
    assert len(inference.requests) == 8  # what is refused by name reaches no engine
