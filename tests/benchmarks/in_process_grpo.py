"""The control for the pipeline: the same model, task, reward and hyper-parameters trained by a plain GRPO loop in one
process, without bus, services or files.

    python tests/benchmarks/in_process_grpo.py --seed 0
    python tests/benchmarks/in_process_grpo.py --seed 0 --model runs/NAME/model        # what a demo started from
    python tests/benchmarks/in_process_grpo.py --seed 0 --shuffle-advantages           # must not learn
    python tests/benchmarks/in_process_grpo.py --seed 0 --staleness 3                  # trains on old rollouts

Prints the held-out pass rate (reasoning-gym's own scorer, 200 prompts) at temperature 1 with 4 samples a prompt, and
greedy, before and after, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np
import torch

from lachesis.pipeline.extensions.reasoning_gym.environment import ReasoningGym
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.inference.serving.results import GenerationResult
from lachesis.pipeline.model.policy import PolicyModel, build_tiny_policy, load_model
from lachesis.pipeline.model.tokenizer import common_beginning
from lachesis.pipeline.tasks.task import prompt_hash
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig, WarmStartConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.step_metrics import StepMetrics
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.pipeline.trainer.warmstart import warm_start
from lachesis.services.demo.prepare import ERROR_RATE

MAX_NEW_TOKENS = 12
WORDS = {"min_word_len": 3, "max_word_len": 5}


def edit_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def passed(item: dict[str, Any], text: str) -> bool:
    return item["answer"].lower() == text.lower()


def reward(item: dict[str, Any], text: str, finished: bool) -> float:
    """Three raters (exact, similar, well-formed) aggregated as mean - variance / 2 (UWO)."""
    answer = item["answer"]
    ratings = np.array(
        [
            float(passed(item, text)),
            1 - edit_distance(text.lower(), answer.lower()) / max(len(text), len(answer)),
            float(finished and text.isalpha()),
        ]
    )
    return float(ratings.mean() - 0.5 * ratings.var())


class Player:
    """Policy, engine and prompts."""

    def __init__(self, policy: PolicyModel, engine: Engine) -> None:
        self.policy, self.engine = policy, engine

    def generate(self, batch: list[dict[str, Any]], n: int, temperature: float, seed: int) -> list[GenerationResult]:
        futures = []
        for index, item in enumerate(batch):
            params = SamplingParams(
                n=n, temperature=temperature, max_tokens=MAX_NEW_TOKENS, seed=seed * 100_003 + index
            )
            futures.append(self.engine.submit(self.prompt(item), params))
        return [future.result() for future in futures]

    def prompt(self, item: dict[str, Any]) -> list[int]:
        messages = [{"role": "user", "content": item["question"]}]
        ids: list[int] = self.policy.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return ids

    def text(self, token_ids: list[int]) -> str:
        decoded: str = self.policy.tokenizer.decode(token_ids, skip_special_tokens=True)
        return decoded

    def pass_rate(self, batch: list[dict[str, Any]], n: int, temperature: float) -> float:
        results = self.generate(batch, n, temperature, seed=7)
        hits = [
            passed(item, self.text(sample.token_ids))
            for item, result in zip(batch, results, strict=True)
            for sample in result.samples
        ]
        return float(np.mean(hits))

    def rollouts(
        self, batch: list[dict[str, Any]], n: int, seed: int, step: int
    ) -> list[list[tuple[float, TrainingSequence]]]:
        """One list for each prompt: (reward, sequence whose advantage is still to be set)."""
        groups = []
        for item, result in zip(batch, self.generate(batch, n, 1.0, seed), strict=True):
            prompt = self.prompt(item)
            group = []
            for sample in result.samples:
                pad = np.zeros(len(prompt), np.float32)
                sequence = TrainingSequence(
                    tokens=np.array(prompt + sample.token_ids, np.int32),
                    loss_mask=np.array([False] * len(prompt) + [True] * len(sample.token_ids)),
                    logprobs=np.concatenate([pad, np.array(sample.logprobs, np.float32)]),
                    advantage=0.0,
                    group_id=prompt_hash(item["question"]),
                    policy_step=step,
                )
                group.append((reward(item, self.text(sample.token_ids), sample.finish_reason == "stop"), sequence))
            groups.append(group)
        return groups


def with_advantages(
    groups: list[list[tuple[float, TrainingSequence]]], *, divide: bool, shuffle: random.Random | None
) -> list[TrainingSequence]:
    """Centre (and divide) within each group; groups without variance are left out."""
    sequences = []
    for group in groups:
        rewards = np.array([value for value, _ in group], np.float64)
        if np.ptp(rewards) <= 1e-6 * max(1.0, float(np.abs(rewards).max())):
            continue
        advantages = (rewards - rewards.mean()).tolist()
        if divide:
            advantages = [value / max(rewards.std(ddof=1), 1e-3) for value in advantages]
        if shuffle is not None:
            shuffle.shuffle(advantages)
        for advantage, (_, sequence) in zip(advantages, group, strict=True):
            sequences.append(
                TrainingSequence(
                    tokens=sequence.tokens,
                    loss_mask=sequence.loss_mask,
                    logprobs=sequence.logprobs,
                    advantage=advantage,
                    group_id=sequence.group_id,
                    policy_step=sequence.policy_step,
                )
            )
    return sequences


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    pools = ReasoningGym.splits("spell_backward", train=8000, held_out=200, warm_start=3000, params=WORDS)
    training, held_out, warm_items = ([pool.task(index).task for index in range(len(pool))] for pool in pools)

    started = time.perf_counter()
    policy = load_model(arguments.model) if arguments.model else warm_started(arguments, warm_items)
    warm_seconds = time.perf_counter() - started

    config = LearnerConfig(learning_rate=arguments.lr, warmup_steps=0, loss=LossConfig(anchor=arguments.anchor))
    learner = Learner(policy.model, config)
    with Engine(policy.model, eos_token_id=policy.tokenizer.eos_token_id, weight_version="in-process") as engine:
        player = Player(policy, engine)
        before, greedy_before = player.pass_rate(held_out, 4, 1.0), player.pass_rate(held_out, 1, 0.0)
        print(f"warm start {warm_seconds:.1f} s: sampled {before:.3f}, greedy {greedy_before:.3f}")
        started = time.perf_counter()
        train(arguments, training, player, learner, held_out)
        seconds = time.perf_counter() - started
        after, greedy_after = player.pass_rate(held_out, 4, 1.0), player.pass_rate(held_out, 1, 0.0)
    gain = 100 * (after - before)
    print(
        f"{learner.steps} steps in {seconds:.1f} s: sampled {after:.3f} ({gain:+.1f} points), greedy {greedy_after:.3f}"
    )
    figures = {
        "before": before,
        "after": after,
        "greedy_before": greedy_before,
        "greedy_after": greedy_after,
        "warm_seconds": round(warm_seconds, 1),
        "seconds": round(seconds, 1),
    }
    print(json.dumps({**vars(arguments), **figures}))


def warm_started(arguments: argparse.Namespace, items: list[dict[str, Any]]) -> PolicyModel:
    """Make the policy as the demo does."""
    policy = build_tiny_policy(arguments.seed, phrases=[common_beginning(item["question"] for item in items)])
    settings = WarmStartConfig(seed=arguments.seed, steps=arguments.warm_steps, slips=arguments.warm_slips)
    warm_start(policy, [(item["question"], item["answer"]) for item in items], settings)
    return policy


def train(
    arguments: argparse.Namespace,
    training: list[dict[str, Any]],
    player: Player,
    learner: Learner,
    held_out: list[dict[str, Any]],
) -> None:
    """Run the steps. With staleness k, a batch waits until k newer ones were generated by newer weights."""
    draw = random.Random(arguments.seed)
    shuffle = random.Random(arguments.seed) if arguments.shuffle_advantages else None
    queue: deque[list[TrainingSequence]] = deque()
    for round_number in range(arguments.steps + arguments.staleness):
        batch = draw.sample(training, arguments.prompts)
        groups = player.rollouts(batch, arguments.samples, 1000 * arguments.seed + round_number, learner.steps)
        queue.append(with_advantages(groups, divide=arguments.divide_by_std, shuffle=shuffle))
        if len(queue) <= arguments.staleness:
            continue
        metrics = learner.step(pack(queue.popleft()))
        if learner.steps % arguments.every == 0:
            mean = float(np.mean([value for group in groups for value, _ in group]))
            report(metrics, mean, player.pass_rate(held_out, 1, 1.0))


def report(metrics: StepMetrics, mean_reward: float, rate: float) -> None:
    values = {key: round(value, 3) for key, value in msgspec.to_builtins(metrics).items() if value is not None}
    kept = ("step", "loss", "grad_norm", "entropy", "kl", "clip_fraction", "sequences", "seconds")
    print(f"reward {mean_reward:.3f} held-out {rate:.3f}", {key: values[key] for key in kept}, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--prompts", type=int, default=16, help="groups a step")
    parser.add_argument("--samples", type=int, default=8, help="samples a group")
    parser.add_argument("--staleness", type=int, default=0, help="train on rollouts this many policy versions old")
    parser.add_argument(
        "--shuffle-advantages", action="store_true", help="control: shuffle advantages within each group"
    )
    parser.add_argument(
        "--divide-by-std", action="store_true", help="divide advantages by the group's standard deviation"
    )
    parser.add_argument("--anchor", choices=["rollout", "proximal"], default=LossConfig().anchor)
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate of GRPO")
    parser.add_argument("--warm-steps", type=int, default=WarmStartConfig().steps)
    parser.add_argument("--warm-slips", type=float, default=ERROR_RATE)
    parser.add_argument("--model", default=None, help="folder of a warm-started model; default: make one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=25, help="steps between progress lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
