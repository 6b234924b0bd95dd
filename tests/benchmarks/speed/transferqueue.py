"""Puts groups into TransferQueue and takes them out again; run by a Python that has it, prints snapshots as JSON.

    python -m speed.transferqueue GROUPS SAMPLES TOKENS BATCH

It keeps everything in memory. Groups come to it as tensors and texts, and leave it in batches; each is deleted then.
"""

import os
import sys

import msgspec
import numpy as np
import ray
import torch
import transfer_queue
from speed.processes import descendants, snapshot
from tensordict import NonTensorStack, TensorDict

WARM_UP = 32


def main(groups: int, samples: int, tokens: int, batch: int) -> None:
    draw = np.random.default_rng(0)
    words = np.array(["".join(map(chr, draw.integers(97, 123, 5))) for _ in range(3000)])
    fields = TensorDict(
        {
            "tokens": torch.from_numpy(draw.integers(0, 150_000, (samples, tokens), dtype=np.int32)),
            "logprobs": torch.from_numpy(draw.normal(size=(samples, tokens)).astype(np.float32)),
            "mask": torch.ones(samples, tokens, dtype=torch.bool),
            "text": NonTensorStack(*[" ".join(draw.choice(words, tokens * 5 // 8)) for _ in range(samples)]),
        },
        batch_size=samples,
    )
    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    try:
        first = None
        for start in range(0, WARM_UP + groups, batch):
            if start >= WARM_UP and first is None:
                first = snapshot({"TransferQueue": descendants(os.getpid())}, start)
            keys = [f"{group}_{sample}" for group in range(start, start + batch) for sample in range(samples)]
            for at in range(0, len(keys), samples):
                transfer_queue.kv_batch_put(keys=keys[at : at + samples], partition_id="train", fields=fields)
            got = transfer_queue.kv_batch_get(keys=keys, partition_id="train")
            assert len(got) == len(keys)
            transfer_queue.kv_clear(keys=keys, partition_id="train")
        last = snapshot({"TransferQueue": descendants(os.getpid())}, WARM_UP + groups)
        sys.stdout.buffer.write(b"\n" + msgspec.json.encode([first, last]) + b"\n")
    finally:
        transfer_queue.close()
        ray.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
