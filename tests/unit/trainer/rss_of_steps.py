"""Prints the bytes by which resident memory grew, at most, while a model was made and took two steps.

python rss_of_steps.py ROWS TOKENS MICROBATCHES RECOMPUTE MODEL_CONFIG
"""

import gc
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import PackedBatch, TrainingSequence, pack


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def a_batch(vocabulary: int, rows: int, tokens: int) -> PackedBatch:
    draw = np.random.default_rng(0)
    return pack(
        [
            TrainingSequence(
                tokens=draw.integers(0, vocabulary, tokens).astype(np.int32),
                loss_mask=np.arange(tokens) > 0,
                logprobs=np.full(tokens, -9.0, np.float32),
                advantage=(-1.0) ** row,
            )
            for row in range(rows)
        ]
    )


def main() -> None:
    rows, tokens, microbatches, recompute = map(int, sys.argv[1:5])
    shape = json.loads(sys.argv[5])
    torch.set_num_threads(1)
    settings = LearnerConfig(max_tokens_per_microbatch=rows * tokens, recompute_layers=bool(recompute))
    tiny = LlamaConfig(**shape | {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 1})
    Learner(AutoModelForCausalLM.from_config(tiny).eval(), settings).step(a_batch(256, 2, 16))  # libraries
    gc.collect()
    before, seen, ended = resident(), [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            seen[0] = max(seen[0], resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    learner = Learner(AutoModelForCausalLM.from_config(LlamaConfig(**shape)).eval(), settings)
    batch = a_batch(shape["vocab_size"], rows * microbatches, tokens)
    for _ in range(2):
        learner.step(batch)
    ended.set()
    watcher.join()
    print(seen[0] - before)


main()
