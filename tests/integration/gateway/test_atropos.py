"""The client that people have installed, unmodified: atroposlib 0.4 in an environment of its own.

It asks for its status three times within three seconds, then it ends: a gateway that takes longer to come back finds
its environments gone, and whoever runs them has to start them again.

Its requirements are not ours, so it is not installed with us: ATROPOS_PYTHON names an interpreter that has it.
"""

import os
import subprocess
from pathlib import Path

import anyio
import pytest
from integration.gateway.world import World

from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus

RUN = "g"

PYTHON = os.environ.get("ATROPOS_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(PYTHON is None, reason="ATROPOS_PYTHON names no interpreter with atroposlib 0.4"),
]


async def test_a_real_environment_registers_throttles_publishes_and_goes_on_after_a_kill_of_the_gateway(
    nats_bus: NatsBus, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    world = World(nats_bus, nats_server, tmp_path)
    world.trains.set()
    async with world.running():
        environment = _start(world, tmp_path / "atropos.log")
        try:
            with anyio.fail_after(120):
                while len(world.batches) < 3:
                    assert environment.poll() is None, (tmp_path / "atropos.log").read_text()[-3000:]
                    await anyio.sleep(0.1)
                world.kill()
                await world.start()
                while environment.poll() != 0:  # it ends so after its six steps
                    if environment.poll() is not None:
                        environment = _start(world, tmp_path / "atropos.log")
                    await anyio.sleep(0.1)
        finally:
            if environment.poll() is None:
                environment.kill()
            environment.wait()
        log = (tmp_path / "atropos.log").read_text()
        assert len(world.batches) >= 6, log[-3000:]
        assert world.worst <= 24
        groups = await world.groups()
        prompts = [int(next(iter(group.sequences)).tokens[1]) for group in groups]
        assert len(set(prompts)) == len(prompts)
        assert all(group.metadata["gateway"]["name"].startswith("words_") for group in groups)
        assert all(group.sequences.excluded_samples == [1] for group in groups)
        assert {message.content for group in groups for message in group.messages[3]} == {"q", "3"}


def _start(world: World, log: Path) -> "subprocess.Popen[bytes]":
    script = Path(__file__).with_name("atropos_environment.py")
    with log.open("ab") as sink:
        return subprocess.Popen(
            [str(PYTHON), str(script), "serve", "--slurm", "false", "--env.rollout_server_url", world.url],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            cwd=log.parent,
        )
