"""Peak memory and speed of an optimizer step on a model with a vocabulary of 150,000, with and without slices.

Each way runs in a process of its own; the figure is the peak of its resident memory less what it held before the step.

    python tests/benchmarks/learner_memory.py [--tokens 16384] [--vocabulary 151936] [--device auto]
"""

import argparse
import multiprocessing
import resource
import sys
import time

WAYS = {
    "whole logits": {"slice_bytes": 1 << 60},
    "slices": {},
    "slices, bfloat16": {"precision": "bfloat16"},
    "slices, layers again": {"recompute_layers": True},
}


def take_steps(arguments: argparse.Namespace, way: dict, answer) -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from lachesis.pipeline.model import logit_memory
    from lachesis.pipeline.model.device import prepare_device
    from lachesis.pipeline.trainer.config import LearnerConfig
    from lachesis.pipeline.trainer.learner import Learner
    from lachesis.pipeline.trainer.packed_batch import TrainingSequence, pack

    device = prepare_device(arguments.device, arguments.threads)
    logit_memory.CPU_SLICE_BYTES = way.pop("slice_bytes", logit_memory.CPU_SLICE_BYTES)
    config = Qwen2Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.width,
        intermediate_size=4 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 64,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().to(device)
    draw, length = np.random.default_rng(0), arguments.tokens // arguments.rows
    batch = pack(
        [
            TrainingSequence(
                tokens=draw.integers(0, arguments.vocabulary, length).astype(np.int32),
                loss_mask=np.arange(length) > 0,
                logprobs=np.full(length, -10.0, np.float32),
                advantage=(-1.0) ** row,
            )
            for row in range(arguments.rows)
        ]
    )
    learner = Learner(model, LearnerConfig(max_tokens_per_microbatch=arguments.tokens, max_step_kl=None, **way))
    weights = sum(value.nbytes for value in model.parameters())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = []
    for _ in range(arguments.steps):
        started = time.perf_counter()
        learner.step(batch)
        seconds.append(time.perf_counter() - started)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    answer.put((weights, peak - before, min(seconds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--way", choices=WAYS, action="append")
    arguments = parser.parse_args()
    logits = 4 * arguments.tokens * arguments.vocabulary
    print(f"{arguments.tokens} tokens, {logits / 1e9:.1f} GB of logits in float32")
    context = multiprocessing.get_context("spawn")
    for name in arguments.way or WAYS:
        answer = context.SimpleQueue()
        process = context.Process(target=take_steps, args=(arguments, dict(WAYS[name]), answer))
        process.start()
        process.join()
        if process.exitcode:
            print(f"{name}: ended with {process.exitcode} (out of memory?)", file=sys.stderr)
            continue
        weights, peak, seconds = answer.get()
        rate = arguments.tokens / seconds
        print(
            f"{name}: {peak / 1e9:.2f} GB above {weights / 1e9:.2f} GB of weights, {seconds:.1f} s, {rate:.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
