"""The recording endpoint: exactness under a thousand sessions at once, and its latency beside direct calls.

    python tests/benchmarks/recording_endpoint.py exact --sessions 1000
    python tests/benchmarks/recording_endpoint.py latency --sessions 32
    python tests/benchmarks/recording_endpoint.py latency --sessions 32 --engine constant

`exact` holds conversations over HTTP, all at once, over the chat templates of four families: streams, tools, rewritten
histories, retries, sub-agents, compaction. Each session has an engine of the tests' own, which spells its answers in
random pieces and remembers all that it has sampled; the recorded sequences are compared with that, token by token and
logprob by logprob. `latency` runs `lachesis up` on a tiny random model, holds conversations with the endpoint, and the
same ones with the run's inference server itself and with a process that only forwards to it, in turn, and prints the
latency of a call and the processor time. What the forwarder adds is the floor: the machine and the client of the
benchmark cost any process in between as much. A tiny model uses up the processors of a small machine, whose queues are
then what is measured: `--engine constant` puts a stand-in in the place of the inference server, which answers each
request after the same time (`constant_engine.py`).
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import anyio
import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from unit.extensions.endpoint.engine import ScriptedEngine
from unit.extensions.endpoint.families import FAMILIES, call_text
from unit.extensions.endpoint.test_recording import (
    TOOL,
    check_against_engine,
    check_each_call_is_trained_once,
    recorded,
)

from lachesis.pipeline.extensions.endpoint.server import EndpointServer, LiveSession
from lachesis.pipeline.inference.connection_pool import ConnectionPool
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy

TURNS = 6
PAUSE_S = 0.05, 0.55
"""Between two calls of a session, by chance: sessions in step would only measure how they queue."""
ENGINE_S = 0.2
"""Of each answer of the stand-in."""
ATTEMPTS = 4
ENVIRONMENT, ENGINE, FORWARDER = "environment-words", "inference-policy", "forwarder"
CONFIG = """
run = "bench"
model = "model"
[environments.words]
kind = "agent"
samples = 8
longest_tokens = 4096
max_new_tokens = 24
concurrency = 8
[environments.words.params]
path = "tasks.jsonl"
task_params = {{ answer = "" }}
reward = "program"
token_file = "sessions.token"
port = {port}
[batching]
batch_size = 64
[evaluate]
held_out = 0
"""
STAND_IN = """
[inference.policy]
url = "http://127.0.0.1:{port}"
"""


async def chat(http: httpx.AsyncClient, key: str, history: list[Any], *, stream: bool = False, **more: Any) -> Any:
    """Return the first answer's message; `stream`: put together from events, as an SDK does.

    A connection that broke is made again, and the request repeated as a retry, as SDKs do.
    """
    headers = {"Authorization": f"Bearer {key}", **more.pop("headers", {})}
    body = {"model": "policy", "messages": history, "stream": stream, **more}
    for retries in range(1, ATTEMPTS + 1):
        try:
            answer = await http.post("/v1/chat/completions", headers=headers, json=body)
            break
        except httpx.TransportError:
            if retries == ATTEMPTS:
                raise
            headers["x-stainless-retry-count"] = str(retries)
    answer.raise_for_status()
    if not stream:
        return answer.json()["choices"][0]["message"]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    calls = [
        {k: v for k, v in call.items() if k != "index"} for delta in deltas for call in delta.get("tool_calls", [])
    ]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {"content": text})}


async def converse(http: httpx.AsyncClient, key: str, engine: ScriptedEngine, family: str) -> None:
    """Hold one conversation of each kind of thing that agents do."""

    async def ask(history: list[Any], text: str, **more: Any) -> Any:
        engine.texts = [text, "other"]
        return await chat(http, key, history, **more)

    history: list[Any] = [{"role": "user", "content": "begin"}]
    for turn in range(2):
        called = await ask(history, call_text(family, "add", f'{{"a": {turn}}}'), tools=[TOOL], stream=turn == 1)
        result = {"role": "tool", "content": "3", "tool_call_id": called["tool_calls"][0]["id"]}
        history += [called, result]
        history.append(await ask(history, f"it is higher or {turn}", tools=[TOOL], stream=turn == 0))
        history.append({"role": "user", "content": f"more {turn}"})
    before = len(engine.sampled)
    body = {"tools": [TOOL], "seed": 1}
    first = await ask(history, "the answer is lower", **body)
    again = await ask(history, "never sampled", headers={"x-stainless-retry-count": "1"}, **body)
    assert again == first, "a retry gets the recorded answer"
    assert len(engine.sampled) == before + 1, "and it is sampled once"
    await ask([{"role": "user", "content": "you help"}], "so I do", n=2)
    await ask([*history[:-1], {"role": "user", "content": "no, otherwise"}], "then otherwise", tools=[TOOL])
    compact = [{"role": "user", "content": "so far: higher or lower"}]
    compact.append(await ask(compact, "<think>aaa</think>\n\nvery well", stream=True))
    await ask([*compact, {"role": "user", "content": "and?"}], "that is all")


async def exact(count: int) -> None:
    """Hold `count` sessions at once, and compare all that is recorded."""
    server = EndpointServer("127.0.0.1", 0, token=None, hold_s=1.0)
    made = [(FAMILIES[number % len(FAMILIES)], number) for number in range(count)]
    engines = [ScriptedEngine(family, seed) for family, seed in made]
    sessions = [recorded(engine) for engine in engines]
    began_s, cpu_s = time.monotonic(), time.process_time()
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
    async with server.running(), httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:

        async def one(number: int) -> None:
            key = f"key-{number}"
            live = LiveSession(sessions[number], {}, takes_rewards=True, reward_name="reward", key=key)
            with server.serving(live):
                async with sessions[number].answering():
                    await converse(http, key, engines[number], made[number][0])

        async with anyio.create_task_group() as tasks:
            for number in range(count):
                tasks.start_soon(one, number)
    seconds, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    sequences = tokens = 0
    for session, engine in zip(sessions, engines, strict=True):
        check_against_engine(session, engine)
        session.fill()
        check_each_call_is_trained_once(session)
        sequences += len(session.session.sequences)
        tokens += sum(sum(one.loss_mask) for one in session.session.sequences)
    calls = sum(len(engine.sampled) for engine in engines)
    print(f"{count} sessions at once over {len(FAMILIES)} templates: {calls} answers, {sequences} sequences, {tokens}")
    print(f"  trained tokens, all equal to the engines' own record; {seconds:.1f} s, {cpu_s / calls * 1e3:.2f} ms of")
    print("  processor time an answer, client, tokenizers and engines included")


def cpu_of(pid: int) -> float:
    """Return the processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _busy_s() -> tuple[float, float]:
    """Return the seconds that the machine's processors were busy, and those there were."""
    spent = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return float(sum(spent) - spent[3] - spent[4]), float(sum(spent))


async def hold(http: httpx.AsyncClient, url: str, key: str, times: list[float]) -> None:
    """Hold one conversation, and append the seconds of each of its calls. `key`: which the engine does not look at."""
    headers = {"Authorization": f"Bearer {key}"}
    history: list[Any] = [{"role": "user", "content": "Say a letter."}]
    chance = random.Random(key)
    await anyio.sleep(chance.uniform(0, PAUSE_S[1]))
    for turn in range(TURNS):
        began_s = time.perf_counter()
        answer = await http.post(
            f"{url}/v1/chat/completions",
            json={"model": "policy", "messages": history, "max_tokens": 16},
            headers=headers,
        )
        times.append(time.perf_counter() - began_s)
        answer.raise_for_status()
        history += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"And {turn}?"}]
        await anyio.sleep(chance.uniform(*PAUSE_S))  # what an agent does between its calls


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextmanager
def program(name: str, *given: str) -> Iterator[int]:
    """Run a program of this folder while the context lasts; yields its process id."""
    place = Path(__file__).with_name(name)
    process = subprocess.Popen([sys.executable, str(place), *given], stdin=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def stand_in(folder: Path, port: int) -> AbstractContextManager[int]:
    """Run the stand-in for an inference server while the context lasts; yields its process id."""
    given = ["--folder", str(folder / "model"), "--port", str(port), "--seconds", str(ENGINE_S)]
    return program("constant_engine.py", *given)


async def latency(count: int, rounds: int, folder: Path, engine: str) -> None:
    """Measure calls of `count` sessions side by side, by the endpoint and directly, in turn."""
    save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=2048), folder / "model")
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"Say {one}"}) + "\n" for one in range(64)))
    port, engine_port = free_port(), free_port()
    is_constant = engine == "constant"
    config = CONFIG.format(port=port) + (STAND_IN.format(port=engine_port) if is_constant else "")
    (folder / "run.toml").write_text(config)
    with stand_in(folder, engine_port) if is_constant else nullcontext() as pid:
        engine_at = None if pid is None else StandIn(f"http://127.0.0.1:{engine_port}", pid)
        await _run_and_measure(count, rounds, BenchRun(folder, port, engine_at))


class StandIn(NamedTuple):
    """Where the stand-in answers, and its process."""

    url: str
    pid: int


class BenchRun(NamedTuple):
    """The run in `folder`, whose endpoint has `port`. `engine` None: it starts its inference server itself."""

    folder: Path
    port: int
    engine: StandIn | None


async def _run_and_measure(count: int, rounds: int, bench: BenchRun) -> None:
    folder = bench.folder
    run = folder / "runs" / "bench"
    with (folder / "up.log").open("ab") as log:
        command = [sys.executable, "-m", "lachesis", "up", "--config", "run.toml"]
        up = subprocess.Popen(  # noqa: ASYNC220 - before any task runs
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        awaited = ["pids.json"] + ([] if bench.engine else ["inference/policy.url"])
        while not all((run / name).exists() for name in awaited):
            if up.poll() is not None:
                raise SystemExit((folder / "up.log").read_text())
            await anyio.sleep(0.1)
        limits = httpx.Limits(max_connections=4 * count, max_keepalive_connections=4 * count)
        async with httpx.AsyncClient(timeout=600, limits=limits) as http:
            await _measure(http, count, rounds, bench)
    finally:
        up.terminate()
        up.wait()


async def _started(http: httpx.AsyncClient, port: int, folder: Path) -> dict[str, Any]:
    while True:
        try:
            bearer = {"Authorization": f"Bearer {(folder / 'sessions.token').read_text().strip()}"}
            answer = await http.post(f"http://127.0.0.1:{port}/sessions", headers=bearer)
            if answer.status_code == 200:
                return answer.json()  # type: ignore[no-any-return]
        except (OSError, httpx.TransportError):
            pass
        await anyio.sleep(0.2)


class Figures(NamedTuple):
    """`times`: seconds of each call, by kind; `cpu`: processor seconds, by kind and process."""

    times: dict[str, list[float]]
    cpu: dict[str, float]


async def _measure(http: httpx.AsyncClient, count: int, rounds: int, bench: BenchRun) -> None:
    place = bench.folder / "runs" / "bench" / "inference" / "policy.url"
    address = place.read_text().strip() if bench.engine is None else bench.engine.url
    server, forwarded = httpx.URL(address), free_port()
    urls = {
        "engine": address,
        FORWARDER: f"http://127.0.0.1:{forwarded}",
        "endpoint": f"http://127.0.0.1:{bench.port}",
    }
    figures = Figures({kind: [] for kind in urls}, {})
    with program("forwarder.py", str(forwarded), server.host, str(server.port)) as forwarder:
        while not await _answers(http, urls[FORWARDER]):  # noqa: ASYNC110 - another process, which sets no event
            await anyio.sleep(0.1)
        await _measure_rounds(http, (count, rounds), bench, urls, {FORWARDER: forwarder}, figures=figures)
    shown = {kind: quantiles(found, n=100) for kind, found in figures.times.items()}
    for kind, found in figures.times.items():
        spent = ", ".join(
            f"{figures.cpu[f'{kind} {name}'] / len(found) * 1e3:.2f} ms of {name}"
            for name in (ENVIRONMENT, ENGINE, FORWARDER)
        )
        p50, p99 = shown[kind][49] * 1e3, shown[kind][98] * 1e3
        print(f"{kind}: {len(found)} calls, p50 {p50:.1f} ms, p99 {p99:.1f} ms; CPU a call: {spent}")
    for name, at in (("p50", 49), ("p99", 98)):
        own, floor = ((shown[kind][at] - shown["engine"][at]) * 1e3 for kind in ("endpoint", FORWARDER))
        print(f"added {name}: {own:.1f} ms by the endpoint, {floor:.1f} ms by a process that only forwards")


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/health")).status_code == 200
    except httpx.TransportError:
        return False


async def _measure_rounds(
    http: httpx.AsyncClient,
    size: tuple[int, int],
    bench: BenchRun,
    urls: dict[str, str],
    others: dict[str, int],
    *,
    figures: Figures,
) -> None:
    """Hold the conversations with each of `urls` in turn. `size`: sessions, rounds. `others`: further processes."""
    folder, port, engine = bench
    count, rounds = size
    times, cpu = figures
    for number in range(rounds + 1):
        began = [await _started(http, port, folder) for _ in range(count)]
        read = json.loads((folder / "runs" / "bench" / "pids.json").read_text())
        pids = {name: int(pid) for name, pid in read.items()} | others
        if engine is not None:
            pids[ENGINE] = engine.pid
        for kind, url in urls.items():
            before = {name: cpu_of(pids[name]) for name in (ENVIRONMENT, ENGINE, FORWARDER)}
            busy = _busy_s()
            found: list[float] = []
            client = httpx.AsyncClient(timeout=600, transport=ConnectionPool(count), trust_env=False)
            async with client, anyio.create_task_group() as tasks:
                for one in began:
                    tasks.start_soon(hold, client, url, str(one["key"]), found)
            if number:  # the first round warms up
                times[kind] += found
                for name, begun_s in before.items():
                    cpu[f"{kind} {name}"] = cpu.get(f"{kind} {name}", 0.0) + cpu_of(pids[name]) - begun_s
                spent_s, all_s = (now - then for now, then in zip(_busy_s(), busy, strict=True))
                print(f"round {number}, {kind}: the machine's processors were busy for {spent_s / all_s:.0%}")
        for place, one in enumerate(began):
            await http.post(f"{one['url']}/reward", json={"reward": float(place % 2)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["exact", "latency"])
    parser.add_argument("--sessions", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=["reference", "constant"], default="reference")
    wanted = parser.parse_args()
    if wanted.what == "exact":
        anyio.run(exact, wanted.sessions or 1000)
        return
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(latency, wanted.sessions or 32, wanted.rounds, Path(folder), wanted.engine)


if __name__ == "__main__":
    main()
