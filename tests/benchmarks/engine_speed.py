"""Tokens a second of the reference engine beside transformers' `generate`, in turn, as a ratio within one run.

Both keep the logprob of each token. By CPU seconds on a CPU, which other work on the machine disturbs least, else by
the clock. `--device cuda --dtype bfloat16` for a GPU; `--model FOLDER` for a model of one's own.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lachesis.pipeline.inference.config import EngineConfig, InferenceConfig
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.engines.reference.placement import place
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.policy import PolicyModel, build_tiny_policy, load_model

SHAPES = [(128, 12), (64, 64), (16, 256)]
PROMPT = [1, 5, 6, 7, 8, 9, 10, 11]
SAMPLES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder; by default a tiny model, and one of 5M parameters")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    settings = InferenceConfig(device=arguments.device, dtype=arguments.dtype, threads=arguments.threads)
    print(f"{'model':>8} {'rows':>5} {'new':>5} {'engine/s':>10} {'generate/s':>10}  ratio (lowest to highest)")
    for policy, shapes in policies(arguments.model):
        device = place(policy, settings, "policy")
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        size = sum(parameter.numel() for parameter in policy.model.parameters()) / 1e6
        with Engine(policy.model, eos_token_id=2, weight_version="v", config=EngineConfig()) as engine:
            for rows, new in shapes:
                pairs = []
                for _ in range(arguments.rounds):
                    took = by_engine(engine, rows, new, clock), by_generate(policy.model, rows, new, device, clock)
                    pairs.append((rows * new / took[0], rows * new / took[1]))
                ratios = sorted(ours / theirs for ours, theirs in pairs)
                ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
                middle = statistics.median(ratios)
                print(f"{size:>7.1f}M {rows:>5} {new:>5} {ours:>10.0f} {theirs:>10.0f}  ", end="")
                print(f"{middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)


def policies(folder: str | None) -> list[tuple[PolicyModel, list[tuple[int, int]]]]:
    if folder is not None:
        return [(load_model(Path(folder)), SHAPES)]
    config = LlamaConfig(
        vocab_size=8000, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    return [
        (build_tiny_policy(0), SHAPES[:2]),
        (PolicyModel(LlamaForCausalLM(config).eval(), None, ""), [(16, 64), SHAPES[2]]),
    ]


def by_engine(engine: Engine, rows: int, new: int, clock: Callable[[], float]) -> float:
    started = clock()
    params = SamplingParams(n=SAMPLES, max_tokens=new, ignore_eos=True)
    for future in [engine.submit(PROMPT, params) for _ in range(rows // SAMPLES)]:
        future.result()
    return clock() - started


def by_generate(
    model: LlamaForCausalLM, rows: int, new: int, device: torch.device, clock: Callable[[], float]
) -> float:
    started = clock()
    prompts = torch.tensor([PROMPT] * rows, device=device)
    with torch.inference_mode():
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=new,
            min_new_tokens=new, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        chosen = out.sequences[:, len(PROMPT) :]
        scores = [logits.float().log_softmax(-1) for logits in out.logits]
        logprobs = torch.stack([row.gather(1, chosen[:, at : at + 1]) for at, row in enumerate(scores)])
        assert bool(logprobs.isfinite().all())
    return clock() - started


if __name__ == "__main__":
    main()
