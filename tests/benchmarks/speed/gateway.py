"""Groups over HTTP as Atropos' environments post them: into our gateway, and into Atropos' own server.

Both get the same groups from the same number of posting tasks, and one trainer asks for batches until all groups have
arrived. `lachesis up` runs whole: groups are stored, leased, scored, normalized and batched before the trainer sees
them, and each answer of success means stored; the stock server keeps them in memory.
"""

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import numpy as np
from speed.figures import Figure, cost_of
from speed.native import Load
from speed.processes import TREE, Processes, by_service, descendants, snapshot

__all__ = ["measure_gateway", "measure_stock"]

_POSTERS = 16
_WARM_UP = 16
_PATIENCE_S = 180.0
_CONFIG = """
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


def _bodies(groups: int, load: Load) -> list[bytes]:
    """Return groups as requests; the second token of the first sample is the group's number.

    Their logprobs are written as those of engines are: of 32 bits, with all digits of 64.
    """
    draw = np.random.default_rng(0)
    made = []
    prompt = load.tokens // 4
    for number in range(groups):
        rows = draw.integers(1000, 30000, (load.samples, load.tokens)).tolist()
        rows[0][1] = number
        spread = draw.normal(-3.0, 3.0, (load.samples, load.tokens - prompt))
        logprobs = (-np.exp(spread)).astype(np.float32).tolist()
        group = {
            "tokens": rows,
            "masks": [[-100] * prompt + row[prompt:] for row in rows],
            "scores": [float(sample % 2) for sample in range(load.samples)],
            "inference_logprobs": [[1.0] * prompt + row for row in logprobs],
        }
        made.append(json.dumps(group).encode())
    return made


async def _measure(scenario: str, url: str, server: int, groups: int, load: Load) -> list[Figure]:
    """Post all groups and ask for batches until all have arrived, the first few before anything is measured."""
    bodies = _bodies(_WARM_UP + groups, load)
    sizes = {"batch_size": load.batch * load.samples, "max_token_len": load.tokens}
    trainer = {"wandb_group": "", "wandb_project": "", "checkpoint_dir": "c", "save_checkpoint_interval": 0}
    env = {"max_token_length": load.tokens, "desired_name": "words", "weight": 1.0, "group_size": load.samples}
    posted: dict[int, float] = {}
    arrived: dict[int, float] = {}
    answered_s: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        register = {**trainer, **sizes, "starting_step": 0, "num_steps": 1 << 20}
        (await http.post("/register", json=register)).raise_for_status()
        await http.get("/batch")
        while (found := (await http.post("/register-env", json=env)).json())["status"] != "success":  # noqa: ASYNC110
            await anyio.sleep(0.1)
        head = b'{"env_id": %d, ' % found["env_id"]

        async def post(numbers: Iterator[int]) -> None:
            for number in numbers:
                posted[number] = time.perf_counter()
                content, kind = head + bodies[number][1:], {"Content-Type": "application/json"}
                (await http.post("/scored_data", content=content, headers=kind)).raise_for_status()
                answered_s.append(time.perf_counter() - posted[number])

        async def pass_on(numbers: range) -> None:
            left = iter(numbers)
            async with anyio.create_task_group() as tasks:
                for _ in range(_POSTERS):
                    tasks.start_soon(post, left)
                while len(arrived) < numbers.stop:
                    batch = (await http.get("/batch")).json()["batch"]
                    now = time.perf_counter()
                    arrived.update((group["tokens"][0][1], now) for group in batch or ())
                    if not batch:
                        await anyio.sleep(0.005)

        await pass_on(range(_WARM_UP))
        answered_s.clear()
        pids = {**by_service(descendants(server)), "clients": os.getpid()}
        first = snapshot(pids)
        await pass_on(range(_WARM_UP, _WARM_UP + groups))
        last = snapshot(pids, groups)
    ages = [arrived[number] - posted[number] for number in range(_WARM_UP, _WARM_UP + groups)]
    return cost_of(scenario, first, last, load.samples) + [
        Figure(scenario, f"{name}, p{quantile}", "ms", 1e3 * float(np.quantile(values, quantile / 100)))
        for name, values in (("answer", answered_s), ("post to trainer", ages))
        for quantile in (50, 99)
    ]


async def _measure_server(scenario: str, processes: Processes, url: str, groups: int, load: Load) -> list[Figure]:
    """Wait until the server answers, then measure. Raises `RuntimeError` with the end of its log if it ends."""
    async with httpx.AsyncClient(base_url=url, timeout=5, trust_env=False) as http:
        with anyio.fail_after(_PATIENCE_S):
            while True:
                if processes.running["server"].poll() is not None:
                    raise RuntimeError(f"{scenario} ended: {processes.log('server')}")
                try:
                    await http.get("/")
                    break
                except httpx.HTTPError:
                    await anyio.sleep(0.1)
    return await _measure(scenario, url, processes.pids["server"], groups, load)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


async def measure_gateway(tree: Path, groups: int, load: Load) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as place:
        folder, port = Path(place), _free_port()
        config = _CONFIG.format(samples=load.samples, tokens=load.tokens, batch=load.batch * load.samples, port=port)
        (folder / "run.toml").write_text(config)
        processes = Processes(folder, tree)
        with processes.ending():
            processes.start("server", ["-m", "lachesis", "up", "--config", "run.toml"])
            return await _measure_server("our gateway", processes, f"http://127.0.0.1:{port}", groups, load)


async def measure_stock(python: str, groups: int, load: Load) -> list[Figure]:
    """Measure the server of atroposlib, which `python` has."""
    with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as place:
        folder, port = Path(place), _free_port()
        processes = Processes(folder, TREE)
        command = ["-m", "uvicorn", "atroposlib.api.server:app", "--log-level", "warning", "--port", str(port)]
        with processes.ending():
            processes.start("server", command, python=python)
            return await _measure_server("Atropos, stock", processes, f"http://127.0.0.1:{port}", groups, load)
