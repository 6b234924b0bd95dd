"""The real atroposlib as `reset` and `step`: an engine samples every action of a class of its users.

`make atropos` installs the library beside us and runs this: ATROPOS_PYTHON names an interpreter that has it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lachesis import AtroposStepEnv
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.config import EngineConfig
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.protocol import SamplingParams, WeightVersionSpan
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy

PYTHON = os.environ.get("ATROPOS_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.skipif(PYTHON is None, reason="atroposlib is not installed; `make atropos` installs it and runs this"),
]
PLACE = f"{Path(__file__).parents[2] / 'integration' / 'gateway' / 'atropos_near.py'}:Near"


def test_a_gem_loop_has_the_ids_and_logprobs_that_the_engine_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "examples"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    policy = build_tiny_policy(0, width=32, layers=1, heads=1, max_length=128)
    save_policy(policy, tmp_path / "model")
    tokenizer = policy.tokenizer

    async def tokenize(messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        return list(ids["input_ids"] if hasattr(ids, "keys") else ids)

    async def detokenize(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids)))

    params = {"python": PYTHON, "settings": {"tokenizer_name": str(tmp_path / "model")}}
    env = AtroposStepEnv(PLACE, tokenize, detokenize, params=params)
    with Engine(
        policy.model, eos_token_id=tokenizer.eos_token_id, weight_version="0-a-b", config=EngineConfig()
    ) as engine:
        for seed in (3, 0, 3):
            observation, info = env.reset(seed=seed)
            assert "Spell this word backward" in observation
            sampling = SamplingParams(
                temperature=info["sampling"]["temperature"], max_tokens=info["sampling"]["max_tokens"]
            )
            assert sampling.max_tokens == 12
            prompt_ids = info["prompt_ids"]
            (result,) = engine.submit(prompt_ids, sampling).result(60).samples
            action = GeneratedSample(
                token_ids=np.array(result.token_ids, np.int32),
                logprobs=np.array(result.logprobs, np.float32),
                text=tokenizer.decode(result.token_ids, skip_special_tokens=True),
                finish_reason=result.finish_reason,
                weight_versions=[WeightVersionSpan(version="0-a-b", start=0, end=len(result.token_ids))],
            )
            _, reward, terminated, truncated, info = env.step(action)
            assert terminated or truncated
            assert 0.0 <= reward <= 1.0
            assert info["tokens"] == [*prompt_ids, *result.token_ids]
            assert info["loss_mask"] == [False] * len(prompt_ids) + [True] * len(result.token_ids)
            np.testing.assert_array_equal(np.float32(info["logprobs"][len(prompt_ids) :]), action.logprobs)
    env.close()
