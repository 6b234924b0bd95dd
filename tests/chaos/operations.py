"""A cluster is operated under a run, one operation after the other; then everything that is stored is audited.

    python tests/chaos/campaign.py --operations --seed 1

The operations are those of a cluster's operator: rolling restarts, killed leaders, a node that is drained (lame
duck), one that comes back with an empty store, the loss of the quorum, a node that is cut off from the others while
clients still reach it, leaders of streams and buckets that step down, and streams that go from three copies to one and
back. The seed decides their order. After each one the run has to take `FRESH` steps, and no service may have ended.
With `--secured` the nodes have TLS, and every process the key of its service.
"""

import random
import shutil
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
from integration.audit import audit
from integration.cluster.nodes import leader_of, settled
from integration.cluster.partition import SplitCluster, open_split_cluster
from integration.harness import RUN, Run

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas.subjects import BUCKET, LEDGER, STREAMS

__all__ = ["OPERATIONS", "operate"]

FRESH = 5
"""Steps after which every service has worked since: more than what may have been under way."""
_NO_QUORUM_S = 10.0
_CUT_OFF_S = 60.0
_STORED = [*STREAMS, BUCKET]
"""Every stream and every key-value bucket of a run."""
_ENDLESS = 100_000
"""Steps that no campaign reaches."""


@dataclass(frozen=True, slots=True)
class _Site:
    """What is operated on."""

    cluster: SplitCluster
    bus: NatsBus
    run: Run
    rng: random.Random

    async def whole(self) -> None:
        """Wait until every stream and bucket has all its copies."""
        await settled(self.bus, _STORED)

    async def restart(self, node: str, how: signal.Signals) -> None:
        await self.cluster.end(node, how)
        self.cluster.start(node)
        await self.whole()

    async def any_leader(self) -> str:
        return await leader_of(self.bus, self.rng.choice(_STORED))


async def _rolling_restart(site: _Site) -> None:
    for node in site.cluster.names:
        await site.restart(node, signal.SIGTERM)


async def _killed_leader(site: _Site) -> None:
    await site.restart(await site.any_leader(), signal.SIGKILL)


async def _lame_duck(site: _Site) -> None:
    """The server sends its clients away, bit by bit, and ends."""
    await site.restart(await site.any_leader(), signal.SIGUSR2)


async def _wiped_store(site: _Site) -> None:
    node = await site.any_leader()
    await site.cluster.end(node)
    await anyio.to_thread.run_sync(shutil.rmtree, site.cluster.folder / node)
    site.cluster.start(node)
    await site.whole()


async def _no_quorum(site: _Site) -> None:
    nodes = site.rng.sample(site.cluster.names, 2)
    for node in nodes:
        await site.cluster.end(node)
    await anyio.sleep(_NO_QUORUM_S)
    for node in nodes:
        site.cluster.start(node)
    await site.whole()


async def _cut_off(site: _Site) -> None:
    """The run has to go on while the node is cut off."""
    node = await leader_of(site.bus, LEDGER)
    async with anyio.create_task_group() as cut:
        cut.start_soon(site.cluster.cut_off, node, _CUT_OFF_S)
        await site.run.wait_for_step(site.run.step() + FRESH)
        cut.cancel_scope.cancel()
    await site.whole()


async def _step_downs(site: _Site) -> None:
    for stream in [stream.name for stream in await site.bus.describe_streams()]:
        subject = f"$JS.API.STREAM.LEADER.STEPDOWN.{stream}"
        await site.bus._link.call_raw(subject, b"", what=f"step-down of {stream}")
        await leader_of(site.bus, stream)


async def _scaling(site: _Site) -> None:
    config = site.run.load_config().streams
    for replicas in (1, 3):
        await site.bus.ensure_streams(msgspec.structs.replace(config, replicas=replicas))
        await settled(site.bus, _STORED, replicas)


OPERATIONS: dict[str, Callable[[_Site], Awaitable[None]]] = {
    "rolling restart": _rolling_restart,
    "killed leader": _killed_leader,
    "lame duck": _lame_duck,
    "wiped store": _wiped_store,
    "no quorum": _no_quorum,
    "cut off": _cut_off,
    "step-downs": _step_downs,
    "scaling": _scaling,
}


async def operate(seed: int, names: list[str], folder: Path, *, secured: bool) -> list[str]:
    """Play the operations `names` in an order that the seed decides; print how each went, and return violations.

    With `secured` the nodes have TLS, and every process the key of its service.
    """
    rng = random.Random(seed)
    found: list[str] = []
    home = folder / "a run"
    home.mkdir()
    async with open_split_cluster(folder / "three nodes", secured=secured) as cluster:
        with Run(home, _ENDLESS, cluster) as run:
            await anyio.to_thread.run_sync(run.start)
            await run.wait_for_step(2)
            async with cluster.during("operator") as bus, anyio.create_task_group() as tasks:
                tasks.start_soon(bus.keep_served)
                site = _Site(cluster, bus, run, rng)
                for name in rng.sample(names, len(names)):
                    await site.whole()
                    services, began, before = _services(site), anyio.current_time(), run.step()
                    await OPERATIONS[name](site)
                    done_s, after = anyio.current_time() - began, run.step()
                    await run.wait_for_step(after + FRESH)
                    total_s = anyio.current_time() - began
                    print(
                        f"{name}: {done_s:.0f} s and {after - before} steps, then {FRESH} more in "
                        f"{total_s - done_s:.0f} s",
                        flush=True,
                    )
                    if _services(site) != services:
                        found.append(f"{name}: a service ended with it")
                tasks.cancel_scope.cancel()
            assert run.process is not None
            run.process.send_signal(signal.SIGTERM)
            await run.wait(400)
        async with cluster.afterwards("audit") as bus:
            audited = await audit(bus, RUN)
    print(f"audit: {audited}")
    return found + list(audited.violations)


def _services(site: _Site) -> dict[str, int]:
    return {name: pid for name, pid in site.run.pids().items() if name not in site.cluster.names}
