"""The client that people have installed, unmodified: atroposlib 0.4 in an environment of its own.

It asks for its status three times within three seconds, then it ends. A gateway takes longer to come back, so its
socket outlives it, and requests wait there.

Its requirements are not ours, so `make atropos` installs it beside us: ATROPOS_PYTHON names an interpreter that has it.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import anyio
import httpx
import pytest
from contract.inference_servers import ARGUMENTS, CPU
from contract.inference_servers import PYTHON as VLLM
from integration.gateway.world import World

import lachesis
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy

RUN = "g"

PYTHON = os.environ.get("ATROPOS_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.skipif(PYTHON is None, reason="atroposlib is not installed; `make atropos` installs it and runs this"),
]


async def test_a_real_environment_registers_throttles_publishes_and_goes_on_after_a_kill_of_the_gateway(
    nats_bus: NatsBus, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    world = World(nats_bus, nats_server, tmp_path)
    world.trains.set()
    async with world.running():
        environment = _start(world, tmp_path / "atropos.log")
        try:
            with anyio.fail_after(240):
                while len(world.batches) < 3:
                    assert environment.poll() is None, (tmp_path / "atropos.log").read_text()[-3000:]
                    await anyio.sleep(0.1)
                world.kill()
                await world.start()
                while environment.poll() is None:  # it ends after its six steps  # noqa: ASYNC110
                    await anyio.sleep(0.1)
        finally:
            if environment.poll() is None:
                environment.kill()
            environment.wait()
        log = (tmp_path / "atropos.log").read_text()
        assert environment.returncode == 0, log[-3000:]
        assert len(world.batches) >= 6, log[-3000:]
        assert world.worst <= 24
        groups = await world.groups()
        prompts = [int(next(iter(group.sequences)).tokens[1]) for group in groups]
        assert len(set(prompts)) == len(prompts)
        assert all(group.metadata["gateway"]["name"].startswith("words_") for group in groups)
        assert all(group.sequences.excluded_samples == [1] for group in groups)
        assert {message.content for group in groups for message in group.messages[3]} == {"q", "3"}


async def test_an_environment_with_the_mixin_draws_by_the_weights_of_what_it_sent(
    nats_bus: NatsBus, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    world = World(nats_bus, nats_server, tmp_path)
    world.trains.set()
    async with world.running(), httpx.AsyncClient(base_url=world.url, trust_env=False) as http:
        environment = _start(world, tmp_path / "atropos.log", "atropos_curriculum.py")
        try:
            with anyio.fail_after(240):
                while environment.poll() is None:  # noqa: ASYNC110 - a process, which ends after its steps
                    await anyio.sleep(0.1)
        finally:
            if environment.poll() is None:
                environment.kill()
            environment.wait()
        log = (tmp_path / "atropos.log").read_text()
        assert environment.returncode == 0, log[-3000:]
        groups = await world.groups()
        assert {group.item.rpartition("-")[0] for group in groups} == {"half", "solved"}, log[-3000:]
        answer = (await http.get("/curriculum", params={"env": "words"})).json()
        seen = {
            kind: [w for name, w in answer["weights"].items() if name.startswith(kind)] for kind in ("half", "solved")
        }
        assert max(seen["solved"]) < min(seen["half"])
        assert 0 < len(seen["half"]) <= 40
        later = [group.item for group in groups[len(groups) // 2 :]]
        drawn = json.loads((tmp_path / "drawn.json").read_text())
        assert drawn["tag"].startswith('W/"')
        assert any(name in answer["weights"] for name in later)
        assert max(drawn["weights"]["solved"]) < min(drawn["weights"]["half"]), "it draws by what the run learned"


CONFIG = """
run = "stock"
model = "model"
[environments.spelling]
kind = "gateway"
samples = 8
longest_tokens = 96
[gateway]
port = {gateway}
[inference.policy]
port = {policy}
{inference}
[batching]
batch_size = 32
[training]
steps = 4
"""


KEYED = 'host = "0.0.0.0"\nkey_file = "key"'
VLLM_CPU = f"""
kind = "vllm"
python = "{VLLM}"
args = {json.dumps(ARGUMENTS)}
{KEYED}
[services]
ready_s = 300
"""
needs_vllm = pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed; `make vllm` installs it")


@pytest.mark.timeout(540)
@pytest.mark.parametrize("inference", ["", KEYED, pytest.param(VLLM_CPU, marks=needs_vllm)], ids=["", "key", "vllm"])
def test_a_stock_environment_samples_the_policy_and_is_trained_on(tmp_path: Path, inference: str) -> None:
    """As its users run it: `python environment.py serve`, the run's URLs, the policy's own answers."""
    # heads of 32: vLLM's attention on a CPU has none smaller
    save_policy(build_tiny_policy(0, width=64, layers=1, heads=2, max_length=128), tmp_path / "model")
    (tmp_path / "key").write_text("a-key\n")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        gateway, policy = one.getsockname()[1], other.getsockname()[1]
    (tmp_path / "run.toml").write_text(CONFIG.format(gateway=gateway, policy=policy, inference=inference))
    server = f"{{model_name: model, base_url: 'http://127.0.0.1:{policy}/v1', server_type: vllm, api_key: a-key}}"
    (tmp_path / "servers.yaml").write_text(f"openai: [{server}, {server}]\n")
    run = tmp_path / "runs" / "stock"
    with (tmp_path / "up.log").open("ab") as log:
        command = [sys.executable, "-m", "lachesis", "up", "--config", "run.toml"]
        up = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, env={**os.environ, **CPU})
    environment = None
    try:
        while up.poll() is None:
            if (run / "gateway.url").exists() and (environment is None or environment.poll() is not None):
                environment = _serve_near(tmp_path, (run / "gateway.url").read_text().strip())
            time.sleep(0.2)
        assert up.returncode == 0, (tmp_path / "up.log").read_text()[-3000:]
    finally:
        for process in (up, environment):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4
    assert steps[0]["staleness/max"] == 0
    assert steps[0]["logprobs/diff"] < 1e-4, "tokens or logprobs are not those that were sampled"
    said = (tmp_path / "up.log").read_text()
    assert f"the policy answers at http://127.0.0.1:{policy} " in said
    assert (f"; its key is in {tmp_path / 'key'}" in said) == bool(inference)
    assert "a-key" not in said


def _serve_near(folder: Path, gateway: str) -> "subprocess.Popen[bytes]":
    """Start the environment; where the gateway is not up yet it ends, and is started again."""
    script = Path(__file__).with_name("atropos_near.py")
    arguments = ["--slurm", "false", "--config", "servers.yaml", "--env.rollout_server_url", gateway]
    examples = str(Path(__file__).parents[2] / "examples")
    with (folder / "environment.log").open("ab") as sink:
        return subprocess.Popen(
            [str(PYTHON), str(script), "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": examples, "HF_HUB_OFFLINE": "1"},
        )


def _start(world: World, log: Path, name: str = "atropos_environment.py") -> "subprocess.Popen[bytes]":
    script = Path(__file__).with_name(name)
    with log.open("ab") as sink:
        return subprocess.Popen(
            [str(PYTHON), str(script), "serve", "--slurm", "false", "--env.rollout_server_url", world.url],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            cwd=log.parent,
            env={**os.environ, "PYTHONPATH": str(Path(lachesis.__file__).parents[1])},
        )
