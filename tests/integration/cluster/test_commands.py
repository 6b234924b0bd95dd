"""Commands beside a cluster without a quorum: they answer, show what they have, and say why there is no more."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from anyio import to_thread
from integration.cluster.nodes import TOKEN, Cluster, leader_of, settled

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.runtime.service import open_service
from lachesis.schemas import subjects

pytestmark = pytest.mark.slow


async def test_commands_answer_without_a_quorum(tmp_path: Path, streams_config: StreamsConfig) -> None:
    with Cluster(tmp_path / "three nodes") as cluster:
        async with await cluster.connect("one", "run") as bus:
            await bus.ensure_streams(msgspec.structs.replace(streams_config, replicas=3))
            await settled(bus, [subjects.LEDGER])
            leader = await leader_of(bus, subjects.LEDGER)
        survivor, *killed = sorted(cluster.names, key=lambda name: name == leader)
        for name in killed:
            await cluster.end(name)
        async with (
            await connect(cluster.url, run="run", name="service", token=TOKEN, needs_jetstream=False) as bus,
            open_service(bus, "scorer", "run") as service,
        ):
            service.mark_ok()
            status = await command(cluster, "status", "--json")
            found = json.loads(status.stdout)
            assert status.returncode == 0
            assert "2 of 3 servers away" in found["problems"][0]
            assert found["streams"] is None
            states = {row["service"]: row["state"] for row in found["services"]}
            assert states["scorer"] == "ok"
            assert states["batcher"] == "unknown"  # not silent: not known
            text = await command(cluster, "status")
            assert "problem  " in text.stdout
            assert "init" not in text.stdout
            top = await command(cluster, "top", "--once")
            assert "stalled for" in top.stdout
            for name in ("health", "dead list"):
                failed = await command(cluster, *name.split())
                assert failed.returncode != 0
                assert "no leader" in failed.stderr
                assert "2 of 3 servers away" in failed.stderr
        assert survivor in cluster.pids()


async def command(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the run "run"; it ends long before a minute."""
    line = [sys.executable, "-m", "lachesis", *arguments, "--run", "run", *cluster.arguments]
    return await to_thread.run_sync(
        lambda: subprocess.run(line, capture_output=True, text=True, check=False, timeout=60, cwd=cluster.folder)
    )
