"""Records real training for the health checks' clean run: what the scorer would say of every group of several runs.

    python tests/benchmarks/health_recording.py --seeds 0 1 2 3 4 --steps 125

Each seed is a run of its own: the demo's model is made and warm-started, then trained by the plain GRPO loop of
in_process_grpo.py, 16 groups of 8 samples a step. Prints the mean score of each run's first and last ten steps, and
writes columns (see `COLUMNS`) to tests/unit/health/recording.npz.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from in_process_grpo import Player, edit_distance, passed, warm_started, with_advantages
from numpy.typing import NDArray

from lachesis.pipeline.extensions.reasoning_gym.environment import ReasoningGym
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.serving.results import GenerationResult
from lachesis.pipeline.scorer.logic.signals import signals_of
from lachesis.pipeline.tasks.task import prompt_hash
from lachesis.pipeline.trainer.config import LearnerConfig, WarmStartConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.sequences import Sequences
from lachesis.services.demo.prepare import ERROR_RATE

COLUMNS = {
    "seed": np.uint8,
    "step": np.uint16,
    "ratings": np.float32,
    "lengths": np.uint8,
    "logprobs": np.float32,
    "texts": np.uint32,
    "truncated": np.uint8,
    "zeros": np.uint16,
    "sure_run": np.uint16,
}
"""By group [N]; by sample [N, 8]: lengths, logprobs and texts; ratings [N, 8, 3]: exact, similar, well-formed."""
PROMPTS, SAMPLES = 16, 8
WORDS = {"min_word_len": 3, "max_word_len": 5}
OUT = Path(__file__).parents[1] / "unit" / "health" / "recording.npz"


def ratings_of(item: dict[str, Any], text: str, finished: bool) -> list[float]:
    answer = item["answer"]
    similar = 1 - edit_distance(text.lower(), answer.lower()) / max(len(text), len(answer))
    return [float(passed(item, text)), similar, float(finished and text.isalpha())]


def as_sequences(prompt: Sequence[int], result: GenerationResult) -> Sequences:
    """The group as its environment would publish it."""
    rows = [(*prompt, *sample.token_ids) for sample in result.samples]
    masks = [bit for sample in result.samples for bit in [False] * len(prompt) + [True] * len(sample.token_ids)]
    logprobs = [value for sample in result.samples for value in [0.0] * len(prompt) + list(sample.logprobs)]
    return Sequences(
        offsets=as_bytes(np.cumsum([0, *map(len, rows)]), "int32"),
        tokens=as_bytes([token for row in rows for token in row], "int32"),
        loss_mask=pack_mask(masks),
        logprobs=as_bytes(logprobs, "float32"),
        finish_reasons=[sample.finish_reason for sample in result.samples],
        version_spans=[],
    )


def record(seed: int, steps: int) -> dict[str, NDArray[Any]]:
    """Train one run and return its columns."""
    pools = ReasoningGym.splits("spell_backward", train=8000, held_out=200, warm_start=3000, params=WORDS)
    training, _, warm_items = ([pool.task(index).task for index in range(len(pool))] for pool in pools)
    arguments = argparse.Namespace(seed=seed, warm_steps=WarmStartConfig().steps, warm_slips=ERROR_RATE)
    policy = warm_started(arguments, warm_items)
    learner = Learner(policy.model, LearnerConfig(learning_rate=3e-4, warmup_steps=0))
    draw = random.Random(seed)
    rows: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    with Engine(policy.model, eos_token_id=policy.tokenizer.eos_token_id, weight_version="in-process") as engine:
        player = Player(policy, engine)
        for step in range(steps):
            batch = draw.sample(training, PROMPTS)
            groups = []
            for item, result in zip(batch, player.generate(batch, SAMPLES, 1.0, 1000 * seed + step), strict=True):
                prompt = player.prompt(item)
                ratings = [
                    ratings_of(item, player.text(sample.token_ids), sample.finish_reason == "stop")
                    for sample in result.samples
                ]
                sequences = as_sequences(prompt, result)
                signals = signals_of(sequences)
                reported = {"seed": seed, "step": step, "ratings": ratings}
                reported |= {"lengths": [len(sample.token_ids) for sample in result.samples]}
                reported |= {name: getattr(signals, name) for name in COLUMNS if hasattr(signals, name)}
                for name, value in reported.items():
                    rows[name].append(value)
                groups.append(
                    [
                        (float(np.mean(values) - 0.5 * np.var(values)), trained(item, sequence, step))
                        for values, sequence in zip(ratings, sequences, strict=True)
                    ]
                )
            learner.step(pack(with_advantages(groups, divide=False, shuffle=None)))
    return {name: np.array(values, COLUMNS[name]) for name, values in rows.items()}


def trained(item: dict[str, Any], sequence: Any, step: int) -> TrainingSequence:
    return TrainingSequence(
        tokens=sequence.tokens,
        loss_mask=sequence.loss_mask,
        logprobs=sequence.logprobs,
        advantage=0.0,
        group_id=prompt_hash(item["question"]),
        policy_step=step,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=125, help="optimizer steps of each run")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for seed in arguments.seeds:
        run = record(seed, arguments.steps)
        runs.append(run)
        ratings = run["ratings"].astype(np.float64)
        scores = (ratings.mean(axis=2) - 0.5 * ratings.var(axis=2)).mean(axis=1)
        first, last = scores[: 10 * PROMPTS].mean(), scores[-10 * PROMPTS :].mean()
        print(f"seed {seed}: {len(scores)} groups, mean score {first:.3f} -> {last:.3f}", flush=True)
    np.savez_compressed(arguments.out, **{name: np.concatenate([run[name] for run in runs]) for name in COLUMNS})


if __name__ == "__main__":
    main()
