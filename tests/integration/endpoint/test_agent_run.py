"""A stranger's agent, with tools, a sub-agent and a compaction, trained by `lachesis up` across a kill.

Its rewards come late, from a judge elsewhere, and the environment is killed while it waits for one. Each rollout is one
trace, from the agent's calls and what the engine does for them to the optimizer step.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from integration.audit import audit
from otlp import Received, receiving

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import fetch_batch, follow_ledger
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.schemas.rollout import RolloutGroup

pytestmark = [pytest.mark.slow, pytest.mark.extension]

AGENT = Path(__file__).parents[2] / "unit/extensions/endpoint/agent_program.py"
CONFIG = """
run = "agents"
model = "model"
[environments.words]
kind = "agent"
samples = 4
longest_tokens = 2048
max_new_tokens = 12
concurrency = 2
[environments.words.params]
command = ["{python}", "agent.py", "--reward", "--team", "--later", "{folder}"]
folder = "."
path = "tasks.jsonl"
reward = "program"
late_reward_s = 300.0
port = {port}
token_file = "sessions.token"
[batching]
batch_size = 8
[evaluate]
held_out = 0
[training]
steps = 3
[telemetry]
endpoint = "{otlp}"
ratio = 1.0
close_s = 60.0
"""


SEQUENCES = 4
"""Of each sample: two ways on from its first step, its sub-agent's, and that after the compaction."""


@pytest.mark.timeout(540)
def test_an_agent_that_knows_a_base_url_alone_is_trained_across_a_kill_of_its_environment(tmp_path: Path) -> None:
    save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=512), tmp_path / "model")
    shutil.copy(AGENT, tmp_path / "agent.py")
    tasks = [{"prompt": f"Say {letter}", "answer": letter} for letter in "abcdefgh"]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    letters = tmp_path / "letters"
    letters.mkdir()
    with receiving("grpc") as received:
        given = {"python": sys.executable, "folder": letters, "port": port, "otlp": received.url}
        (tmp_path / "run.toml").write_text(CONFIG.format(**given))
        run = train(tmp_path, letters)
    anyio.run(check_streams, run)
    check_traces(received)


def train(tmp_path: Path, letters: Path) -> Path:
    """Run the configuration to its end, kill its environment once, and report the rewards in `letters`."""
    run, killed = tmp_path / "runs" / "agents", False
    with (tmp_path / "up.log").open("ab") as sink:
        command = [sys.executable, "-m", "lachesis", "up", "--config", "run.toml"]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OTEL_BSP_SCHEDULE_DELAY": "100"}
        up = subprocess.Popen(command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    try:
        while up.poll() is None:  # the test's own limit ends it
            time.sleep(0.2)
            metrics = run / "metrics.jsonl"
            waiting = sorted(letters.glob("*.json"))
            if not killed and waiting and metrics.exists() and '"train/step":1' in metrics.read_text():
                os.kill(int(json.loads((run / "pids.json").read_text())["environment-words"]), 9)
                killed = True
            for letter in waiting:
                if report_late(*json.loads(letter.read_text())):
                    letter.unlink()
    finally:
        up.terminate()
        up.wait()
    text = (tmp_path / "up.log").read_text()
    assert up.returncode == 0, text
    assert killed
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/sequences"] for line in lines if "train/step" in line] == [8 * SEQUENCES] * 3
    return run


def check_traces(received: Received) -> None:
    """The calls of a trained sample, and what the engine did for them, are in the trace of its group."""
    traces: dict[bytes, list[Any]] = {}
    for _, span in received.spans:
        traces.setdefault(span.trace_id, []).append(span)
    trained = [spans for spans in traces.values() if any(span.name == "train.consume" for span in spans)]
    assert trained
    for spans in trained:
        ids = {name: {span.span_id for span in spans if span.name == name} for name in ("generate", "chat policy")}
        below = {name: {span.name for span in spans if span.parent_span_id in found} for name, found in ids.items()}
        assert below["generate"] >= {"chat policy", "store call"}
        assert below["chat policy"] == {"llm_request"}
        (consumed,) = [span for span in spans if span.name == "train.consume"]
        (link,) = consumed.links
        assert "optimizer.step" in {span.name for span in traces[link.trace_id] if span.parent_span_id == link.span_id}
    names = {span.name for _, span in received.spans}
    assert any(name.startswith("recorded call") for name in names), "of the groups that were taken up after the kill"


def report_late(url: str, report: object) -> bool:
    """Return whether a judge's report is stored. It is sent again while the environment is away."""
    try:
        return httpx.post(url, json=report, timeout=60).status_code == 200
    except httpx.TransportError:
        return False


async def check_streams(run: Path) -> None:
    """Nothing is lost or trained twice, and what is trained are all sequences of each sample."""
    groups = 0
    async with (
        EmbeddedServer(run / "nats") as server,
        await connect(server.url, run="agents", name="audit", token=server.token) as bus,
    ):
        assert (await audit(bus, "agents")).violations == []
        async for entry in follow_ledger(bus, "agents", "main", LedgerPosition(), follow=False):
            if entry.batch is not None:
                for _, group, _ in await fetch_batch(bus, entry.batch):
                    check_sequences(group)
                    groups += 1
    assert groups >= 6  # the batcher may have formed one more batch than was trained


def check_sequences(group: RolloutGroup) -> None:
    """Each sample has its own conversation last, and each sampled token under the mask of one sequence."""
    sequences = list(group.sequences)
    assert group.sequences.sample_index == [sample for sample in range(4) for _ in range(SEQUENCES)]
    for sample, note in enumerate(group.metadata["samples"]):
        assert note["calls"] == {"all": SEQUENCES + 1, "trained": SEQUENCES + 1}
        own = sequences[SEQUENCES * sample :][:SEQUENCES]
        runs = [int((np.diff(one.loss_mask.astype(np.int8)) == 1).sum()) for one in own]
        assert sum(runs) == SEQUENCES + 1  # calls: the first step is trained in one of the two ways on from it
        assert runs[-1] == max(runs)
