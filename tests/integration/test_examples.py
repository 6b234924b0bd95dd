"""The runs of deploy/examples in small: every setting but a handful, on a random Qwen2 and the reference server."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from integration.test_tracking import inspected
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, latest_checkpoint, state_of
from lachesis.pipeline.model.policy import PolicyModel, save_policy
from lachesis.pipeline.model.tokenizer import build_character_tokenizer, tokenizer_hash

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
STEPS = 2
SMALL: dict[str, object] = {
    "training.steps": STEPS,
    "training.wandb.project": "examples",
    "batching.batch_size": 16,
    "environments.gsm8k.max_new_tokens": 24,
    "evaluation.gsm8k.max_new_tokens": 24,
    "evaluate.items": 8,
    "inference.policy.kind": "reference",
    "inference.eval.kind": "reference",
    "health.act": "warn",  # what an untrained model writes would stop any run
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of Qwen2.5's architecture, which guesses answers: it has a token for each of the small ones."""
    tokenizer = build_character_tokenizer(max_length=2048, phrases=[f"#### {answer}" for answer in range(1, 13)])
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = Qwen2ForCausalLM(config).eval()
        for name, parameter in policy.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.05)
    folder = tmp_path_factory.mktemp("model")
    save_policy(PolicyModel(policy, tokenizer, tokenizer_hash(tokenizer)), folder)
    return folder


def start(*arguments: str, file: str, sets: Mapping[str, object]) -> "subprocess.Popen[str]":
    """Start a `lachesis` command on one of the files, in their folder."""
    settings = [f"--set={name}={value}" for name, value in sets.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "lachesis", *arguments, "--config", file, *settings],
        cwd=EXAMPLES,
        env={**os.environ, "WANDB_MODE": "offline"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("file", "more"), [("gsm8k_1gpu.toml", {}), ("gsm8k_8gpu.toml", {"training.ranks": 2, "training.device": "cpu"})]
)
def test_an_example_trains_evaluates_and_leaves_a_checkpoint_that_can_be_evaluated(
    file: str, more: dict[str, object], model: Path, tmp_path: Path
) -> None:
    sets = {"model": model, "folder": tmp_path, **SMALL, **more}
    output, _ = (up := start("up", file=file, sets=sets)).communicate(timeout=400)
    assert up.returncode == 0, output

    newest = latest_checkpoint(tmp_path / CHECKPOINTS)
    assert newest is not None
    state = state_of(newest)
    assert state is not None
    assert state.step == STEPS
    assert isinstance(AutoModelForCausalLM.from_pretrained(newest), Qwen2ForCausalLM)
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    assert [figures["train/step"] for figures in logged] == [1, 2]
    settings = tomllib.loads((EXAMPLES / file).read_text())["training"]["learner"]
    peak, warmup_steps = settings["learning_rate"], settings["warmup_steps"]
    assert logged[-1]["train/learning_rate"] == pytest.approx(peak * STEPS / warmup_steps), "still warming up"
    rows = [record["history"]["item"] for record in inspected(tmp_path) if "history" in record]
    for figures in (logged[-1], {name: value for row in rows for name, value in row.items()}):
        assert 0 <= figures["eval/gsm8k/avg@2"] <= 1
        assert figures["eval/gsm8k/step"] == STEPS
    assert "the best by held-out rate" in output

    report = tmp_path / "evaluation.json"
    evaluate = start("eval", str(newest), "--out", str(report), file=file, sets=sets)
    output, _ = evaluate.communicate(timeout=200)
    assert evaluate.returncode == 0, output
    (measured,) = json.loads(report.read_bytes())["evaluations"]
    assert (measured["tasks"], measured["samples"], measured["errors"]) == (8, 2, {})
    assert measured["avg"] is not None
