"""Tokens a second of an optimizer step, as a share of a bare loop's on the same model and batch.

The bare loop is what a user would write: whole logits of a micro-batch, fused AdamW, no checks and no statistics. Ways
take turns in one process, and the best of their steps counts.

    python tests/benchmarks/learner_speed.py [--rows 8] [--length 256] [--lognormal 0.8] [--layers 6] [--way NAME]...
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lachesis.pipeline.model.device import prepare_device
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import PackedBatch, TrainingSequence, pack

WAYS = {
    "defaults": {},
    "padded rows": {"packing": False},
    "no step KL": {"max_step_kl": None},
    "layers again": {"recompute_layers": True},
}


def a_batch(arguments: argparse.Namespace) -> PackedBatch:
    """Rows of random tokens, up to `spread` fewer than `length`; or of lognormal lengths, `length` at most."""
    draw = np.random.default_rng(0)
    sequences = []
    for row in range(arguments.rows):
        length = int(arguments.length * (1 - arguments.spread * draw.random()))
        if arguments.lognormal:
            length = int(min(arguments.length, max(8, arguments.length / 5 * draw.lognormal(0, arguments.lognormal))))
        sequences.append(
            TrainingSequence(
                tokens=draw.integers(0, arguments.vocabulary, length).astype(np.int32),
                loss_mask=np.arange(length) > length // 8,
                logprobs=np.full(length, -math.log(arguments.vocabulary), np.float32),
                advantage=(-1.0) ** row,
            )
        )
    return pack(sequences)


def bare_loop(model: torch.nn.Module, batch: PackedBatch, arguments: argparse.Namespace) -> Callable[[], None]:
    """The step that a user would write."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        for _, part in batch.microbatches(arguments.tokens):
            micro = part.to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(micro.tokens_BT[:, :-1]).logits
            logprobs = torch.log_softmax(logits.float(), -1).gather(-1, micro.tokens_BT[:, 1:, None])[..., 0]
            ratio = (logprobs - micro.logprobs_BT[:, 1:]).exp()
            loss = -(ratio * micro.advantages_BT[:, 1:])[micro.mask_BT[:, 1:]].sum() / batch.trainable_tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """Wall time of one step, the device's work included."""
    started = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--lognormal", type=float, default=0.0, help="sigma; median --length / 5")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--way", choices=WAYS, action="append")
    arguments = parser.parse_args()
    device = prepare_device(arguments.device, arguments.threads)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.width,
        intermediate_size=arguments.width * 8 // 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 64,
        num_key_value_heads=max(1, arguments.width // 192),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    batch = a_batch(arguments)
    steps: dict[str, Callable[[], object]] = {}
    for name in ("bare loop", *(arguments.way or WAYS)):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(device)
        if name == "bare loop":
            steps[name] = bare_loop(model, batch, arguments)
            continue
        settings = {"learning_rate": 1e-6, "max_tokens_per_microbatch": arguments.tokens} | WAYS[name]
        steps[name] = partial(Learner(model, LearnerConfig(**settings)).step, batch)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.repeat):
        for name, step in steps.items():
            seconds[name].append(seconds_of(step, device))
    tokens, bare = int(batch.lengths_B.sum()), min(seconds["bare loop"])
    for name, found in seconds.items():
        print(f"{name}: {tokens / min(found):.0f} tokens/s, {bare / min(found):.2f} of the bare loop")


if __name__ == "__main__":
    main()
