"""`lachesis promote` on a real server: the services as processes, killed while the run is switched."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from chaos import ledger_checks, refold
from chaos.history import read_history
from integration.audit import audit
from integration.replay.test_replay import RUN, World, world
from integration.replay.test_shadow import until

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.promotion.record import read_promotions
from lachesis.schemas import subjects
from lachesis.schemas.annotations import GroupReward, RewardEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import LedgerEntry

__all__ = ["world"]

SERVICES = ("scorer", "scorer", "normalizer", "batcher")
STALE = ("--set", "batching.max_staleness=100000")


class Services:
    """Processes of the run, started with the configuration that it began with, and again whenever one was killed."""

    def __init__(self, world: World, names: Sequence[str], sets: Sequence[str]) -> None:
        self.world, self.names, self.sets = world, names, sets
        self.running = [self.start(i) for i in range(len(names))]

    def start(self, i: int) -> subprocess.Popen[bytes]:
        with (self.world.folder / f"{i}-{self.names[i]}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "lachesis", "run", self.names[i], "--config", "live.toml", *STALE, *self.sets],
                cwd=self.world.folder,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                stdout=log,
                stderr=log,
            )

    async def strike(self, i: int) -> None:
        self.running[i].kill()
        await anyio.to_thread.run_sync(self.running[i].wait)
        self.running[i] = self.start(i)


@contextmanager
def services(world: World, *names: str, sets: Sequence[str] = ()) -> Iterator[Services]:
    found = Services(world, names or SERVICES, sets)
    try:
        yield found
    finally:
        for process in found.running:
            process.kill()
            process.wait()


async def newest_entry(world: World) -> LedgerEntry | None:
    last = await world.bus.last(subjects.LEDGER, subjects.ledger(RUN, "main"))
    return decode(LedgerEntry, last.data) if last else None


async def resolved(world: World) -> int:
    """Groups that have an outcome."""
    entry = await newest_entry(world)
    return sum(entry.totals.get(kind, 0) for kind in ("batched", "zero_variance", "unscorable")) if entry else 0


async def rewards(world: World) -> list[tuple[int | None, GroupReward]]:
    """Every live reward with what scored it, in the order of ROLLOUTS, without stamps."""
    found = []
    async with world.bus.read(subjects.EVENTS, [subjects.event("reward", RUN, "live")], follow=False) as messages:
        async for message in messages:
            event = decode(RewardEvent, message.data)
            found += [(event.promoted, msgspec.structs.replace(item, stamps=[])) for item in event.groups]
    return sorted(found, key=lambda one: one[1].seq)


async def no_violation(world: World) -> None:
    config = load(run_config_type(), file=world.folder / "live.toml", sets=[STALE[1]]).config
    history = await read_history(world.bus, RUN)
    for found in (
        ledger_checks.promotions(history),
        ledger_checks.chain(history),
        ledger_checks.outcomes(history, config.batching),
        ledger_checks.manifests(history),
        ledger_checks.stored_once(history),
        ledger_checks.reasons(history, config.batching, config.advantage.std_floor),
        ledger_checks.writer_state(history),
        await refold.normalizer(world.bus, history, config, "sums"),
        (await audit(world.bus, RUN)).violations,
    ):
        assert found == []


async def switched(world: World, *, kills: int) -> None:
    """Switch a run that goes on, kill its services `kills` times meanwhile, and audit all of it."""
    draw, count = random.Random(kills), 10
    await world.store(count)
    await world.replay("honest")
    with services(world) as running:
        await until(lambda: reached(world, count))
        asked = world.start("promote", "honest", "--json", "--wait", "200")
        struck = 0
        while asked.poll() is None or struck < kills:
            await world.store(count + 3, count)
            count += 3
            if count > await resolved(world) + 60:
                await anyio.sleep(0.5)  # on a busy machine they would be more and more
            if struck < kills:
                await anyio.sleep(draw.random())
                await running.strike(draw.randrange(len(SERVICES)))
                struck += 1
        code, out, err = await world.ended(asked)
        assert code == 0, err
        first = json.loads(out)["first"]
        assert first is not None, err
        await world.store(count + 30, count)
        count += 30
        await until(lambda: reached(world, count))
        await until(lambda: rewarded(world, count))
        code, out, err = await world.lachesis("status", "--json")
        assert json.loads(out)["ledger"]["promoted"]["revision"] == "honest", err
    found = await rewards(world)
    assert 10 < first < found[-1][1].seq
    assert [promoted for promoted, _ in found] == [first if one.seq >= first else None for _, one in found]
    await no_violation(world)
    # what came out is what replays of both sides give
    await world.replay("after", "--from-seq", str(first))
    assert [one for promoted, one in found if promoted] == (await world.facts("after"))[1]
    code, _, err = await world.lachesis(
        "replay",
        "--revision",
        "before",
        "--to-seq",
        str(first - 1),
        "--set",
        "scoring.raters=[{rater='integration.replay.judges:bribed'}]",
    )
    assert code == 0, err
    assert [one for promoted, one in found if not promoted] == (await world.facts("before"))[1]


async def reached(world: World, count: int) -> bool:
    return await resolved(world) >= count


async def rewarded(world: World, count: int) -> bool:
    return len(await rewards(world)) == count


@pytest.mark.slow
async def test_a_run_goes_on_with_a_revision_and_says_so(world: World) -> None:
    await switched(world, kills=0)
    code, out, err = await world.lachesis("promote", "honest", "--json")
    assert code == 0, err
    assert json.loads(out)["first"] == (await read_promotions(world.bus, RUN, "live"))[0][0].first, "asked for once"
    code, _, err = await world.lachesis("promote", "other")
    assert (code, b"has no revision 'other': try it first" in err) == (2, True)
    code, _, err = await world.lachesis("promote", "honest", "--set", "advantage.estimator=grpo")
    assert (code, b"advantage.sums.estimator was 'centred', is 'grpo'" in err) == (2, True)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_killed_while_it_is_switched_every_rollout_is_judged_once(world: World) -> None:
    await switched(world, kills=12)


@pytest.mark.slow
async def test_a_run_leaves_raters_that_stay_away_and_loses_no_rollout(world: World) -> None:
    await world.store(6)
    await world.replay("honest")
    away = ("--set", "scoring.raters=[{rater='integration.replay.judges:absent'}]", "--set", "scoring.patience_s=0.1")
    with services(world, *SERVICES, "governor", sets=away):
        code, out, err = await world.lachesis("promote", "honest", "--json")
        assert code == 0, err
        first = json.loads(out)["first"]
        await world.store(9, 6)
        await until(lambda: rewarded(world, 3))
        assert await resolved(world) <= 3, "those before wait"
        code, _, err = await world.lachesis("promote", "honest", "--give-up")
        assert code == 0, err
        await until(lambda: buried(world, 6))
        code, out, err = await world.lachesis("dead", "requeue", "--reason", "given up", "--yes", "--json")
        assert code == 0, err
        stored = {row["message"]["seq"]: row["stored"] for row in json.loads(out)}
        await until(lambda: rewarded(world, 9))
    assert sorted(stored) == [1, 2, 3, 4, 5, 6]
    assert min(stored.values()) > first
    assert {promoted for promoted, _ in await rewards(world)} == {first}
    await world.replay("after", "--from-seq", str(first))
    assert [one for _, one in await rewards(world)] == (await world.facts("after"))[1]


async def buried(world: World, count: int) -> bool:
    entry = await newest_entry(world)
    return entry is not None and entry.totals.get("dead", 0) >= count
