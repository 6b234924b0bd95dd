"""`lachesis shadow` as an operator uses it, on a real server, beside a live run: followed, listed, killed, stopped."""

import json
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from integration.replay.test_replay import LIVE, RUN, World, world
from stages import run_normalizer, run_scorer

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.retention.holds import read_record
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import RewardEvent
from lachesis.schemas.codec import decode

__all__ = ["world"]


@asynccontextmanager
async def live_run(world: World) -> AsyncIterator[None]:
    """Score and normalize by the live configuration while the context is open."""
    config = load(run_config_type(), file=world.folder / "live.toml").config
    services = [Service(world.bus, name, RUN) for name in ("scorer", "normalizer")]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_scorer, services[0], config)
        tasks.start_soon(run_normalizer, services[1], config)
        yield
        for service in services:
            service.drain()


async def shadows(world: World) -> list[dict[str, Any]]:
    code, out, err = await world.lachesis("shadow", "list", "--json")
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)
    return found


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(150):
        while not await condition():  # noqa: ASYNC110 - it is elsewhere
            await anyio.sleep(0.05)


async def committed(world: World, revision: str) -> int:
    """Groups that a revision holds."""
    return len((await world.facts(revision))[0])


async def rewarded(world: World) -> int:
    async with world.bus.read(subjects.EVENTS, [subjects.event("reward", RUN, "live")], follow=False) as messages:
        return sum([len(decode(RewardEvent, message.data).groups) async for message in messages])


@pytest.mark.slow
async def test_it_follows_the_live_run_and_is_listed_and_stopped(world: World) -> None:
    assert LIVE
    process = world.start("shadow", "start", "honest", "--json")

    async def known() -> bool:
        return await world.bus.last(subjects.REPLAY, subjects.revision(RUN, "honest")) is not None

    async def both() -> bool:
        return await committed(world, "honest") == 40 == await rewarded(world)

    await until(known)
    async with live_run(world):
        await world.store(40)
        await until(both)

        async def told() -> bool:
            rows[:] = await shadows(world)
            return [
                (row["revision"], row["state"], row["position"], row["lag"], row["compared"]["pairs"]) for row in rows
            ] == [("honest", "ok", 41, 0, 40)]

        rows: list[dict[str, Any]] = []
        await until(told)
    await until(told)  # a heartbeat may be late
    (row,) = rows
    assert row["compared"]["rank_correlation"] < 0.6, "the bribed rater ranks otherwise"
    assert row["compared"]["sign_flips"] > 0.9
    assert [hold.about for hold in (await read_record(world.bus, RUN)).holds.values()] == ["shadow honest"]

    async def shown() -> bool:
        code, out, err = await world.lachesis("status", "--json")
        assert code == 0, err
        return "shadow-honest" in {service["service"] for service in json.loads(out)["services"]}

    await until(shown)
    code, out, err = await world.lachesis("shadow", "stop", "honest")
    assert code == 0, err
    code, out, err = await world.ended(process)
    assert code == 0, err
    assert json.loads(out)["digest"] == (await world.replay("whole"))["digest"]
    assert (await read_record(world.bus, RUN)).holds == {}
    code, _, err = await world.lachesis("shadow", "stop", "honest")
    assert code == 2
    assert b"no shadow of revision 'honest' answers" in err
    (row,) = await shadows(world)
    assert (row["state"], row["pid"], row["position"]) == ("not running", None, 41)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_killed_again_and_again_while_the_run_goes_on_it_gives_the_bits_of_a_replay(world: World) -> None:
    lives, each, process = 5, 80, None
    async with live_run(world), anyio.create_task_group() as tasks:
        for life in range(lives):
            before = await committed(world, "honest")
            tasks.start_soon(world.store, each * (life + 1), each * life)  # so that there is always something further
            process = world.start("shadow", "start", "honest", "--from-seq", "1", "--max-rate", "60", "--json")
            assert process.poll() is None

            async def further(before: int = before) -> bool:
                return await committed(world, "honest") > before

            if life < lives - 1:
                await until(further)
                await killed(world, process)

    async def done() -> bool:
        return await committed(world, "honest") == lives * each

    assert process is not None
    await until(done)
    process.send_signal(signal.SIGINT)
    code, out, err = await world.ended(process)
    assert code == 0, err
    assert json.loads(out)["digest"] == (await world.replay("whole"))["digest"]
    assert await world.facts("honest") == await world.facts("whole")


async def killed(world: World, process: subprocess.Popen[bytes]) -> None:
    process.kill()
    assert (await world.ended(process))[0] == -signal.SIGKILL
