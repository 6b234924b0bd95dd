"""A run on a mixture-of-experts model whose rollouts say which experts they were sampled with.

The reference server records none, so the environment stands for a server that does.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, latest_checkpoint, state_of
from lachesis.pipeline.model.policy import PolicyModel, save_policy
from lachesis.pipeline.model.tokenizer import build_character_tokenizer, tokenizer_hash

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ENVIRONMENT = '''
import numpy as np
from lachesis import Environment, Task

class Routed(Environment):
    """Items 0 to 5 have four experts a token, as the model does; items 6 and 7 have six."""

    def __len__(self):
        return 8

    def task(self, index):
        return Task(item=f"item-{index}", prompt="say a", task={"width": 4 if index < 6 else 6})

    async def rollout(self, task, session):
        reply = await session.generate()
        rows = np.tile(np.arange(task.task["width"]) % 4, (len(session.tokens) - 1, 1))
        session.routed_experts = rows.astype(np.int16)

    def reward(self, task, session):
        return float(sum(map(ord, session.text)) % 7)
'''

CONFIG = """
run = "routed"
model = "model"
folder = "run"
[environments.routed]
kind = "env.py:Routed"
samples = 4
max_new_tokens = 8
longest_tokens = 64
column_bytes = 12
[evaluate]
held_out = 0.0
[health]
act = "warn"
[batching]
batch_size = 16
[training]
steps = 4
[[training.inputs]]
input = "routed_experts"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = build_character_tokenizer(max_length=64)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    policy = PolicyModel(Qwen3MoeForCausalLM(config).eval(), tokenizer, tokenizer_hash(tokenizer))
    save_policy(policy, tmp_path / "model")
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def up(folder: Path, *sets: str) -> str:
    words = [word for one in sets for word in ("--set", one)]
    command = [sys.executable, "-m", "lachesis", "up", "--config", str(folder / "run.toml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "run" / "logs" / "trainer.log").read_text()


def test_columns_reach_the_model_and_a_group_that_does_not_fit_is_left_out_of_its_batch(folder: Path) -> None:
    log = up(folder)
    assert "of ROLLOUTS: routed_experts: sequence 0: 6 experts a token, where the model has 2 layers with 2: 4" in log
    newest = latest_checkpoint(folder / "run" / CHECKPOINTS)
    assert newest is not None
    state = state_of(newest)
    assert state is not None
    assert state.step == 4
    assert not state.voids
