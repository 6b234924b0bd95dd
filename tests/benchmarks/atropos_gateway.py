"""Delivered groups a second and their latency: the gateway beside Atropos' own server, with the same clients.

    python tests/benchmarks/atropos_gateway.py --python .venv-atropos/bin/python

`--python` is an interpreter that has atroposlib 0.4 (`make atropos` makes one). Both servers get the same groups from
the same number of posting tasks, and one trainer asks for batches until all groups have arrived. Each server runs
alone, one after the other, several times. `lachesis up` runs whole: groups are stored, leased, scored, normalized and
batched before the trainer sees them, and each answer of success means stored; the stock server keeps them in memory.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import anyio
import httpx
import numpy as np

BATCH_GROUPS = 8
SAMPLES = 8
POSTERS = 16
CONFIG = """
run = "bench"
mode = "observe"
inference.policy.url = "http://127.0.0.1:9"
[environments.words]
kind = "gateway"
samples = {samples}
longest_tokens = {tokens}
[batching]
batch_size = {batch}
max_staleness = 100000
[gateway]
port = {port}
needs_token = false
"""


def bodies(groups: int, tokens: int) -> list[bytes]:
    """Return groups as requests; the second token of the first sample is the group's number."""
    draw = np.random.default_rng(0)
    made = []
    for number in range(groups):
        rows = draw.integers(1000, 30000, (SAMPLES, tokens)).tolist()
        rows[0][1] = number
        prompt = tokens // 4
        group = {
            "tokens": rows,
            "masks": [[-100] * prompt + row[prompt:] for row in rows],
            "scores": [float(sample % 2) for sample in range(SAMPLES)],
            "inference_logprobs": [[1.0] * prompt + [-0.5] * (tokens - prompt)] * SAMPLES,
        }
        made.append(json.dumps(group).encode())
    return made


async def measure(url: str, groups: list[bytes], tokens: int) -> dict[str, float]:
    """Post all groups and ask for batches until all have arrived."""
    posted: dict[int, float] = {}
    answered_s: list[float] = []
    arrived: dict[int, float] = {}
    sizes = {"batch_size": BATCH_GROUPS * SAMPLES, "max_token_len": tokens}
    trainer = {"wandb_group": "", "wandb_project": "", "checkpoint_dir": "c", "save_checkpoint_interval": 0}
    env = {"max_token_length": tokens, "desired_name": "words", "weight": 1.0, "group_size": SAMPLES}
    numbers = iter(range(len(groups)))
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        (
            await http.post("/register", json={**trainer, **sizes, "starting_step": 0, "num_steps": 1 << 20})
        ).raise_for_status()
        await http.get("/batch")
        while (found := (await http.post("/register-env", json=env)).json())["status"] != "success":  # noqa: ASYNC110
            await anyio.sleep(0.1)
        head = b'{"env_id": %d, ' % found["env_id"]

        async def post() -> None:
            for number in numbers:
                posted[number] = time.perf_counter()
                answer = await http.post(
                    "/scored_data", content=head + groups[number][1:], headers={"Content-Type": "application/json"}
                )
                answer.raise_for_status()
                answered_s.append(time.perf_counter() - posted[number])

        started = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(POSTERS):
                tasks.start_soon(post)
            while len(arrived) < len(groups):
                batch = (await http.get("/batch")).json()["batch"]
                now = time.perf_counter()
                for group in batch or ():
                    arrived[group["tokens"][0][1]] = now
                if not batch:
                    await anyio.sleep(0.005)
        seconds = time.perf_counter() - started
    ages = [arrived[number] - posted[number] for number in posted]
    return {
        "groups/s": len(groups) / seconds,
        "answer p50 ms": 1e3 * float(np.quantile(answered_s, 0.5)),
        "answer p99 ms": 1e3 * float(np.quantile(answered_s, 0.99)),
        "to trainer p50 ms": 1e3 * float(np.quantile(ages, 0.5)),
        "to trainer p99 ms": 1e3 * float(np.quantile(ages, 0.99)),
    }


@asynccontextmanager
async def served(command: list[str], folder: Path, url: str, patience_s: float) -> AsyncIterator[None]:
    """Run a server for as long as the context lasts; it answers from the beginning."""
    with (folder / "server.log").open("ab") as log:
        process = await anyio.open_process(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=5, trust_env=False) as http:
            with anyio.fail_after(patience_s):
                while True:
                    if process.returncode is not None:
                        raise SystemExit((folder / "server.log").read_text()[-3000:])
                    try:
                        await http.get("/")
                        break
                    except httpx.HTTPError:
                        await anyio.sleep(0.1)
        yield
    finally:
        with anyio.CancelScope(shield=True):
            process.terminate()
            await process.wait()


async def run(python: str, groups: int, tokens: int, rounds: int) -> None:
    made = bodies(groups, tokens)
    found: dict[str, list[dict[str, float]]] = {"stock server": [], "gateway": []}
    for number in range(rounds):
        for name, rows in found.items():
            with tempfile.TemporaryDirectory() as place, socket.create_server(("127.0.0.1", 0)) as free:
                folder, port = Path(place), free.getsockname()[1]
                free.close()
                if name == "gateway":
                    settings = {"samples": SAMPLES, "tokens": tokens, "batch": BATCH_GROUPS * SAMPLES, "port": port}
                    (folder / "run.toml").write_text(CONFIG.format(**settings))
                    command = [sys.executable, "-m", "lachesis", "up", "--config", "run.toml"]
                else:
                    server = ["-m", "uvicorn", "atroposlib.api.server:app", "--log-level", "warning"]
                    command = [python, *server, "--host", "127.0.0.1", "--port", str(port)]
                async with served(command, folder, f"http://127.0.0.1:{port}", 180):
                    rows.append(await measure(f"http://127.0.0.1:{port}", made, tokens))
            shown = ", ".join(f"{key} {value:.4g}" for key, value in rows[-1].items())
            print(f"round {number + 1}, {name}: {shown}", flush=True)
    print(f"\nmedians of {rounds} rounds; {groups} groups of {SAMPLES} x {tokens} tokens, {POSTERS} posting tasks")
    for key in found["gateway"][0]:
        stock, ours = (median(row[key] for row in found[name]) for name in found)
        print(f"{key:20} stock server {stock:9.4g}   gateway {ours:9.4g}   ratio {ours / stock:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has atroposlib")
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.environ.setdefault("XDG_STATE_HOME", tempfile.mkdtemp())
    anyio.run(run, str(Path(given.python).absolute()), given.groups, given.tokens, given.rounds)


if __name__ == "__main__":
    main()
