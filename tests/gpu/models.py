"""Models with random weights in the shapes of known ones, random batches for them, and a GPU's clock."""

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from lachesis.pipeline.trainer.packed_batch import PackedBatch, pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence

__all__ = [
    "DEVICE",
    "THREADS",
    "batch_of",
    "config_of",
    "free_memory",
    "mean_seconds",
    "model_of",
    "peak_gb",
    "seconds_of",
    "synchronize",
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THREADS = 8 if DEVICE == "cuda" else 1
"""Of the CPU: more than one is no faster for a tiny model, and far slower on a busy machine."""

_QWEN = {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 8192}


def config_of(shape: str) -> PretrainedConfig:
    """Return the shape of SmolLM2-135M (0.135B), Qwen2.5-0.5B and -1.5B, or one that a CPU computes with in no time."""
    match shape:
        case "0.135B":
            return LlamaConfig(
                vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192,
            )  # fmt: skip
        case "0.5B":
            return Qwen2Config(
                hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, **_QWEN
            )
        case "1.5B":
            return Qwen2Config(
                hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, **_QWEN
            )
    return LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip


def model_of(shape: str, device: str, *, sharpened: float = 1.0) -> Any:
    """Return a model in float32, with the same weights on every device; `sharpened` scales its embeddings."""
    torch.manual_seed(0)
    with torch.device(DEVICE):  # which draws a billion in no time
        model = AutoModelForCausalLM.from_config(config_of(shape), attn_implementation="sdpa", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "embed" in name:
            parameter.data.mul_(sharpened)
    return model.eval().to(device)


def batch_of(vocabulary: int, rows: int, length: int, seed: int = 0, *, uneven: bool = False) -> PackedBatch:
    """Return random sequences of one length, with advantages of both signs.

    `uneven`: of lognormal lengths, whose median is a fifth of `length`, which is the most.
    """
    draw = np.random.default_rng(seed)
    lengths = [length] * rows
    if uneven:
        lengths = np.clip(length / 5 * draw.lognormal(0, 0.8, rows), 8, length).astype(int).tolist()
    return pack(
        [
            TrainingSequence(
                tokens=draw.integers(0, vocabulary, own).astype(np.int32),
                loss_mask=np.arange(own) > own // 8,
                logprobs=np.full(own, -math.log(vocabulary), np.float32),
                advantage=(-1.0) ** row,
            )
            for row, own in enumerate(lengths)
        ]
    )


def synchronize() -> None:
    """Wait for what the GPU has been given."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], repeat: int = 3) -> float:
    """Return the fewest seconds that a call takes."""
    found = []
    for _ in range(repeat):
        synchronize()
        began = time.perf_counter()
        call()
        synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


def mean_seconds(call: Callable[[], Any], repeat: int) -> float:
    """Return the mean seconds of a call that is made some times."""
    synchronize()
    began = time.perf_counter()
    for _ in range(repeat):
        call()
    synchronize()
    return (time.perf_counter() - began) / repeat


def free_memory() -> None:
    """Return what is no longer used to the GPU, and count its peak from there."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb() -> float | None:
    """Return the most memory of the GPU that tensors have taken since `free_memory`; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else None
