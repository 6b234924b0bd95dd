"""Trainers of Atropos as processes on a run with a real server, and a gateway that is killed under them."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from integration.gateway.test_gateway import Client
from integration.gateway.world import World

from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import fetch_batch, follow_ledger
from lachesis.schemas import subjects
from lachesis.schemas.ledger import TrainReport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

RUN = "g"
STEPS = 20
LIBRARY = os.environ.get("ATROPOS_PYTHON")


@pytest.fixture
async def world(nats_bus: NatsBus, nats_server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[World]:
    made = World(nats_bus, nats_server, tmp_path, mode="observe")
    async with made.running():
        yield made


class Trainer:
    """One trainer's process; `file` has a line for each batch that it trained."""

    def __init__(self, world: World, folder: Path, user: str, *, steps: int, python: str | None = None) -> None:
        self.file = folder / f"{user}.trained"
        self.log = folder / f"{user}.log"
        url = world.url.replace("http://", f"http://{user}:none@")
        script = str(Path(__file__).with_name("atropos_trainer.py"))
        command = [python or sys.executable, script, url, str(steps), str(self.file), *(["library"] if python else [])]
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)

    def trained(self) -> list[list[int]]:
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text().splitlines(keepends=True) if line.endswith("\n")]

    async def until(self, batches: int) -> None:
        with anyio.fail_after(240):
            while len(self.trained()) < batches:
                assert self.process.poll() in (None, 0), self.log.read_text()[-3000:]
                await anyio.sleep(0.02)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@asynccontextmanager
async def environments(world: World) -> AsyncIterator[None]:
    """Two workers that generate while the body runs, one group each at a time."""
    async with httpx.AsyncClient(base_url=world.url, timeout=150, trust_env=False) as http:
        client = Client(http)
        env_id = await client.register("words")
        numbers = iter(range(10_000))

        async def work() -> None:
            while True:
                await client.post(next(numbers), env_id=env_id)

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(work)
            yield
            tasks.cancel_scope.cancel()


async def batched(world: World, count: int) -> list[list[int]]:
    """The prompts of the first batches of the ledger, in its order."""
    found: list[list[int]] = []
    async with aclosing(follow_ledger(world.bus, "g", "main", LedgerPosition(), follow=False)) as entries:
        async for entry in entries:
            if entry.batch is not None and len(found) < count:
                payloads = await fetch_batch(world.bus, entry.batch)
                found.append([int(next(iter(group.sequences)).tokens[1]) for _, group, _ in payloads])
    return found


async def reported(world: World) -> int:
    subject = subjects.state("g", "trainer", subjects.LIVE, "main")
    report, _, _ = await read_last_event(world.bus, subjects.LEDGER, subject, TrainReport, lambda _: True)
    return report.next_batch if report else 0


async def test_a_stock_trainer_takes_twenty_batches_across_kills_of_the_gateway(world: World, tmp_path: Path) -> None:
    """A kill between the noted receipt and the last byte costs the batch on its way: the API has no acknowledgement."""
    trainer = Trainer(world, tmp_path, "lachesis", steps=STEPS)
    kills = (3, 8, 9, 14)
    try:
        async with environments(world):
            for count in kills:
                await trainer.until(count)
                world.kill()
                await world.start()
            await trainer.until(STEPS)
            assert trainer.process.wait(60) == 0, trainer.log.read_text()[-3000:]
    finally:
        trainer.stop()
    trained = trainer.trained()
    handed_out = await batched(world, STEPS + 1)
    before_last = handed_out[: handed_out.index(trained[-1])]
    cut_off = [number for number, batch in enumerate(before_last) if batch not in trained]
    assert len(cut_off) <= 1, "the moment is under a millisecond: two of four kills do not meet it"
    assert all(any(count <= number <= count + 2 for count in kills) for number in cut_off), "only what was on its way"
    expected = [batch for number, batch in enumerate(handed_out) if number not in cut_off][:STEPS]
    assert trained == expected, "each batch once, in the ledger's order"
    prompts = [prompt for batch in trained for prompt in batch]
    assert len(set(prompts)) == len(prompts) == 2 * STEPS
    assert await reported(world) == STEPS - 1 + len(cut_off), "the last one counts once the trainer asks after it"
    assert world.worst <= 24


async def test_two_trainers_of_one_name_share_the_batches(world: World, tmp_path: Path) -> None:
    """Neither ends before the other is done: one that ends keeps its last batch, and the run waits for that one."""
    trainers = [Trainer(world, tmp_path, user, steps=1000) for user in ("main.left", "main.right")]
    try:
        async with environments(world):
            for trainer in trainers:
                await trainer.until(4)
    finally:
        for trainer in trainers:
            trainer.stop()
    left, right = (trainer.trained() for trainer in trainers)
    handed_out = await batched(
        world, len(left) + len(right) + len(trainers)
    )  # each may have held one when it was ended
    assert len({tuple(batch) for batch in left + right}) == len(left) + len(right), "nobody trains another's batch"
    assert all(batch in handed_out for batch in left + right)


@pytest.mark.skipif(LIBRARY is None, reason="atroposlib is not installed; `make atropos` installs it and runs this")
async def test_the_librarys_own_batch_client_takes_each_batch_once(world: World, tmp_path: Path) -> None:
    trainer = Trainer(world, tmp_path, "lachesis", steps=5, python=LIBRARY)
    try:
        async with environments(world):
            await trainer.until(5)
    finally:
        trainer.stop()
    assert trainer.trained() == await batched(world, 5)
