"""A trainer as those of Atropos are, with their calls, retries and times: run as a process, `URL STEPS FILE [library]`.

It registers, collects batches until there is none, then trains on what it has: a line of FILE for each batch, the
prompts of its groups. With `library` it registers and asks through the functions of atroposlib itself, batch by batch.
"""

import json
import sys
import time
from pathlib import Path

import requests
from tenacity import retry, stop_after_attempt, wait_exponential

BATCH_SIZE = 8


@retry(stop=stop_after_attempt(5), wait=wait_exponential(multiplier=1, min=2, max=30))
def register(url, steps):
    settings = {
        "wandb_group": "", "wandb_project": "", "batch_size": BATCH_SIZE, "max_token_len": 64, "starting_step": 0,
        "checkpoint_dir": "checkpoints", "save_checkpoint_interval": 10, "num_steps": steps,
    }  # fmt: skip
    answer = requests.post(f"{url}/register", json=settings, timeout=10)
    answer.raise_for_status()
    assert "uuid" in answer.json()


@retry(stop=stop_after_attempt(5), wait=wait_exponential(multiplier=1, min=2, max=30))
def get_batch(url):
    data = requests.get(f"{url}/batch", timeout=10).json()
    if data.get("status") == "error":
        raise RuntimeError(data["message"])
    return data


def collect(url):
    batches = []
    while True:
        data = get_batch(url)
        if data["batch"] is not None:
            batches.append(data["batch"])
        elif batches:
            return batches
        else:
            time.sleep(1)


def batches_of(url, steps):
    register(url, steps)
    waiting = []
    for _ in range(steps):
        waiting = waiting or collect(url)
        yield waiting.pop(0)


def batches_by_library(url, steps):
    import asyncio

    from atroposlib.cli import sft

    asyncio.run(sft.register_to_api(4, 64, url, steps, BATCH_SIZE // 4))
    for _ in range(steps):
        yield asyncio.run(sft.check_for_batch(url))


def main():
    url, steps, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    batches = batches_by_library if sys.argv[4:] == ["library"] else batches_of
    with file.open("a") as sink:
        for batch in batches(url, steps):
            assert sum(len(group["scores"]) for group in batch) == BATCH_SIZE
            assert all(len(row) == len(tokens) for group in batch
                       for row, tokens in zip(group["inference_logprobs"], group["tokens"], strict=True))  # fmt: skip
            print(json.dumps([group["tokens"][0][1] for group in batch]), file=sink, flush=True)


if __name__ == "__main__":
    main()
