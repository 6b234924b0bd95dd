"""`lachesis replay --workers` on a real server: the bits of one process, whichever process is killed."""

import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest
from fuzz.examples import group
from integration.harness import alive
from integration.replay.test_replay import RUN, World, world

from lachesis.schemas import subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.replay import RescoreEvent
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences, VersionSpan

__all__ = ["world"]

RATERS = '--set=scoring.raters=[{{rater = "integration.replay.judges:{}", name = "one"}}, {{rater = "repetition"}}]'


def workers_of(process: "subprocess.Popen[bytes]") -> list[int]:
    """Return the pids of a replay's workers."""
    with suppress(FileNotFoundError, ProcessLookupError):
        children = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        return [pid for pid in children if b"replay.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return []


def heeds_signals(pid: int) -> bool:
    """Return whether a process has come so far that SIGTERM does not end it."""
    with suppress(FileNotFoundError, ProcessLookupError):
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(50):
        while not condition():  # noqa: ASYNC110 - it is about other processes
            await anyio.sleep(0.01)


async def progress(world: World) -> None:
    """Wait until something more is committed."""
    before = await world.replayed()
    with anyio.fail_after(50):
        while await world.replayed() == before:  # noqa: ASYNC110 - it is elsewhere
            await anyio.sleep(0.01)


@contextmanager
def running(world: World, command: Sequence[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a command that does not outlive the test."""
    process = world.start(*command)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def unscored(world: World, revision: str) -> list[tuple[int, str]]:
    """Return sequence and reason of what has no score."""
    found: list[tuple[int, str]] = []
    async with world.bus.read(subjects.REPLAY, [subjects.replay("rescore", RUN, revision)], follow=False) as messages:
        async for message in messages:
            found += [(one.seq, one.reason) for one in decode(RescoreEvent, message.data).unscored]
    return found


async def store_unanswered(world: World, n: int) -> None:
    await store(world, group(id=f"{n:032x}", run=RUN, counter=n, messages=[[Message(role="user", content="?")]] * 2))


async def store(world: World, made: RolloutGroup) -> None:
    headers = {PLAN_HEADER: Plan.of(made).pack()}
    await world.bus.publish(subjects.rollout(RUN, "sums"), encode(made), msg_id=made.id, headers=headers)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_any_number_of_workers_gives_the_same_bits(world: World) -> None:
    await world.store(30)
    await store_unanswered(world, 31)
    await world.store(80, after=31)
    alone = await world.replay("alone", RATERS.format("first"))
    for workers in ("2", "3"):
        # what a rater prints is no message of the worker's
        shared = await world.replay(f"by-{workers}", RATERS.format("noisy"), "--workers", workers)
        assert (shared["digest"], shared["groups"], shared["unscored"]) == (alone["digest"], 80, 1)
        assert await world.facts(f"by-{workers}") == await world.facts("alone")
        assert await unscored(world, f"by-{workers}") == await unscored(world, "alone")


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_workers_and_their_replay_may_be_killed_and_paused(world: World) -> None:
    await world.store(400)
    whole = await world.replay("whole")
    draw = random.Random(3)
    command = ("replay", "--revision", "killed", "--workers", "2", "--max-rate", "6", "--json")

    with running(world, command) as process:
        for _ in range(3):  # the first before it is ready, for what is stored first is what the revision is
            await until(lambda: len(workers_of(process)) == 2)
            await progress(world)
            victim = draw.choice(workers_of(process))
            os.kill(victim, signal.SIGKILL)
            await until(lambda pid=victim: pid not in workers_of(process))
        await until(lambda: len(workers_of(process)) == 2)
        workers = workers_of(process)
        process.kill()  # the replay itself
        code, _, err = await world.ended(process)
        assert code == -signal.SIGKILL
        assert err.count(b"another takes its place") == 3, err
        await until(lambda: not any(map(alive, workers)))

    with running(world, command) as process:
        await until(lambda: len(workers_of(process)) == 2 and all(map(heeds_signals, workers_of(process))))
        await progress(world)
        workers = workers_of(process)
        for pid in (process.pid, *workers):  # as a service manager tells all of a group
            os.kill(pid, signal.SIGTERM)
        for pid in (process.pid, *workers):  # as a terminal that ends does
            os.kill(pid, signal.SIGHUP)
        code, out, err = await world.ended(process)
        assert code == 130, err
        assert b"another takes its place" not in err
        assert 0 < json.loads(out)["groups"] < 400
        assert not any(map(alive, workers))

    rest = await world.replay("killed", "--workers", "2")
    assert (rest["groups"], rest["finished"], rest["digest"]) == (400, True, whole["digest"])
    assert await world.facts("killed") == await world.facts("whole")


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_large_groups_that_wait_for_nothing_fit_their_commits(world: World) -> None:
    draw = random.Random(1)
    mask = [False, True] * 128
    for n in range(1, 301):
        said = [[Message(role="assistant", content="so " * draw.randrange(1, 9))] for _ in range(128)]
        sequences = Sequences(
            offsets=as_bytes(range(0, 257, 2), "int32"), tokens=as_bytes(range(256), "int32"),
            loss_mask=pack_mask(mask), logprobs=as_bytes([-1.0 if learn else 0.0 for learn in mask], "float32"),
            finish_reasons=["stop"] * 128, version_spans=[VersionSpan(i, 0, 0) for i in range(128)],
        )  # fmt: skip
        await store(world, group(id=f"{n:032x}", run=RUN, counter=n, messages=said, sequences=sequences))
    raters = [f'{{rater = "repetition", name = "r{i}"}}' for i in range(4)]
    found = await world.replay("large", f"--set=scoring.raters=[{', '.join(raters)}]", "--workers", "2")
    assert (found["groups"], found["unscored"]) == (300, 0)
    async with world.bus.read(subjects.REPLAY, [subjects.replay("rescore", RUN, "large")], follow=False) as messages:
        events = [decode(RescoreEvent, message.data) async for message in messages]
    commits = [sum(len(score.scores) for score in event.scores) for event in events]
    assert sum(commits) == 300 * 128
    assert max(commits) <= 2048 + 128


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_rollout_that_kills_whoever_judges_it_ends_the_replay_by_name(world: World) -> None:
    await world.store(10)
    code, _, err = await world.lachesis(
        "replay", "--revision", "dead", "--workers", "2", "--max-inflight", "4", RATERS.format("deadly")
    )
    assert code == 2
    assert b"5 workers died, one after the other, while they scored the rollouts from sequence 7 to 7" in err, err


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_what_a_worker_says_at_its_start_ends_the_replay(world: World) -> None:
    """Raters that only the replay's own process can load: they came from a file that is gone."""
    await world.store(10)
    file = world.folder / "fleeting.py"
    file.write_text(
        "import pathlib\nfrom lachesis import rater\npathlib.Path(__file__).unlink()\n"
        "@rater(bounds=(0.0, 1.0), inline=True)\ndef judge(sample): return 1.0\n"
    )
    code, _, err = await world.lachesis(
        "replay", "--revision", "gone", "--workers", "2", '--set=scoring.raters=[{rater = "fleeting:judge"}]'
    )
    assert code == 2
    assert b"module 'fleeting' was not found" in err, err
