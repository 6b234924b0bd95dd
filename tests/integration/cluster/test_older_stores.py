"""Two nodes of three come back with older stores after everybody was killed: named, recovered from, trained to the end.

The node that has what the others lost calls itself current afterwards, so its copies have to be made again. What it
alone had is saved before, and its rollouts are stored again: none is lost.
"""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
from integration.audit import audit
from integration.cluster.nodes import Cluster, settled
from integration.harness import CONFIG, RUN, SUMS, Run, alive, until

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.retention.holds import read_record
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.subjects import EVENTS, LEDGER, ROLLOUTS, STREAMS, stream_name

MANY = 1_000_000
ASKED = 9
"""Times that each message is requested: one of three copies answers, whichever is nearest."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "run"
    folder.mkdir()
    with Cluster(tmp_path / "nodes") as cluster, Run(folder, MANY, cluster) as it:
        yield it


async def differing(bus: NatsBus, stream: str) -> dict[int, dict[str, int]]:
    """Return what the copies of a stream answer differently, by sequence."""
    found: dict[int, dict[str, int]] = {}
    subject = f"$JS.API.DIRECT.GET.{stream_name(RUN, stream)}"
    for seq in range(1, (await bus.usage(stream)).last + 1):
        answers: Counter[str] = Counter()
        for _ in range(ASKED):
            msg = await bus.client.request(subject, msgspec.json.encode({"seq": seq}), timeout=30)
            headers = msg.headers or {}
            answers[headers.get("Status") or headers.get("Nats-Time-Stamp", "")] += 1
        if len(answers) > 1:
            found[seq] = dict(answers)
    return found


async def rollouts_on(bus: NatsBus, server: str) -> set[str]:
    """Return the groups that one server's copy of ROLLOUTS holds."""
    async with aclosing(bus.read_copy(ROLLOUTS, server, start=1, headers_only=True)) as messages:
        return {
            Plan.unpack(one.headers[PLAN_HEADER]).group
            async for one in messages
            if one.subject.startswith("rl.rollout.")
        }


async def test_two_nodes_with_older_stores_are_recovered_from(run: Run, tmp_path: Path) -> None:
    cluster = run.servers
    assert isinstance(cluster, Cluster)
    older = cluster.names[:2]
    run.start()
    await run.wait_for_step(2)
    assert run.process is not None
    run.process.terminate()
    assert await run.wait(120) in (0, -signal.SIGTERM)
    for name in cluster.names:
        await cluster.end(name)
    for name in older:
        shutil.copytree(cluster.folder / name, tmp_path / "older" / name)
    for name in cluster.names:
        cluster.start(name)

    run.start()
    await run.wait_for_step(run.step() + 3)
    async with cluster.during("the third") as bus:
        stored = await rollouts_on(bus, cluster.names[2])
    everyone = run.pids()
    for pid in (run.process.pid, *everyone.values()):
        os.kill(pid, signal.SIGKILL)
    run.process.wait()
    for process in cluster.processes.values():
        process.wait()
    await until(lambda: not any(map(alive, everyone.values())), 90)
    for name in older:
        shutil.rmtree(cluster.folder / name)
        shutil.copytree(tmp_path / "older" / name, cluster.folder / name)
        cluster.start(name)
    async with cluster.during("the older alone") as bus:  # they lead, as most of the nodes
        assert (await bus.usage(LEDGER)).last
    cluster.start(cluster.names[2])

    steps = run.step() + 4
    run.config.write_text(CONFIG.format(sums=SUMS, steps=steps))
    code, said = run.called("up")
    assert code != 0
    assert f"`lachesis runs recover {RUN}`" in said
    code, said = run.called("runs", "recover", "--yes")
    assert code == 0, said
    assert "of LEDGER, but it ends at sequence" in said
    assert f"what only the copy of ROLLOUTS on {cluster.names[2]} has is saved in" in said
    async with cluster.during("copies") as bus:
        assert stored <= await rollouts_on(bus, cluster.names[0]), "what the third node alone had is stored again"
        await settled(bus, STREAMS)
        for stream in (ROLLOUTS, EVENTS, LEDGER):
            assert await differing(bus, stream) == {}
    code, said = run.called("runs", "recover", "--yes")
    assert (code, "needs no recovery" in said) == (0, True), said

    run.start()
    assert await run.wait(400) == 0, run.tail()
    assert run.step() == steps
    async with cluster.afterwards("audit") as bus:
        lost = (await read_record(bus, RUN)).lost
        found = await audit(bus, RUN)
        assert {one.replicas for one in await bus.describe_streams()} == {3}
    assert {ROLLOUTS, EVENTS, LEDGER} <= set(lost)
    assert not [one for one in found.violations if "no rollout is stored" not in one]
