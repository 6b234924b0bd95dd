"""A part of the store, or all of it, is older than the rest: named, recovered from, trained to the end."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from chaos import refold
from chaos.history import History, read_history
from integration.audit import audit
from integration.harness import CONFIG, RUN, SUMS, Run, alive, until
from integration.servers import Supervised

from lachesis.pipeline.retention.holds import read_record
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import TrainReport
from lachesis.services.run.connect import NATS_FOLDER

MANY = 1_000_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "run"
    folder.mkdir()
    with Run(folder, MANY, Supervised(folder)) as it:
        yield it


async def roll_back(run: Run, stream: str | None) -> History:
    """Run for some steps twice, kill everybody, and leave `stream`, or the whole store, as it was between.

    Return what was stored before.
    """
    run.start()
    await run.wait_for_step(3)
    assert run.process is not None
    run.process.terminate()
    assert await run.wait(120) in (0, -signal.SIGTERM)
    name = "jetstream" if stream is None else f"streams/{subjects.stream_name(RUN, stream)}"
    part = next((run.folder / NATS_FOLDER).rglob(name))
    shutil.copytree(part, run.folder / "older")

    run.start()
    await run.wait_for_step(run.step() + 4)
    everyone = run.pids()
    for pid in (run.process.pid, *everyone.values()):
        with suppress(ProcessLookupError):  # it has ended with its supervisor
            os.kill(pid, signal.SIGKILL)
    run.process.wait()
    await until(lambda: not any(map(alive, everyone.values())), 90)
    async with run.servers.afterwards("before") as bus:
        before = await read_history(bus, RUN)
    shutil.rmtree(part)
    shutil.copytree(run.folder / "older", part)
    return before


async def recover(run: Run, stream: str, refusal: str, plan: str) -> int:
    """See the run refused and recovered by the one command that is named, then trained on; return its last step."""
    steps = run.step() + 5
    run.config.write_text(CONFIG.format(sums=SUMS, steps=steps))
    code, said = run.called("up")
    assert code != 0
    assert refusal in said
    assert f"`lachesis runs recover {RUN}`" in said
    code, said = run.called("doctor")
    assert (code, "FAIL" in said, stream in said) == (1, True, True), said
    code, said = run.called("runs", "recover", "--yes")
    assert code == 0, said
    assert plan in said
    code, said = run.called("runs", "recover", "--yes")
    assert (code, "needs no recovery" in said) == (0, True)

    run.start()
    assert await run.wait(400) == 0, run.tail()
    assert run.step() == steps
    return steps


async def test_a_bucket_that_rolled_back_is_recovered_from(run: Run) -> None:
    before = await roll_back(run, subjects.BUCKET)
    await recover(run, subjects.BUCKET, f"of {subjects.BUCKET}, but ", "the bucket's keys are older")
    async with run.servers.afterwards("audit") as bus:
        found = await audit(bus, RUN)
        history = await read_history(bus, RUN)
        assert await refold.normalizer(bus, history, run.load_config(), "sums") == []
    assert found.violations == []
    assert {one.seq for one in before.rollouts} <= {one.seq for one in history.rollouts}


async def test_rollouts_that_rolled_back_further_than_their_scores_are_recovered_from(run: Run) -> None:
    before = await roll_back(run, subjects.ROLLOUTS)
    steps = await recover(
        run, subjects.ROLLOUTS, "of ROLLOUTS, but it ends at sequence", "lost rollouts that are known by name"
    )
    async with run.servers.afterwards("audit") as bus:
        lost = (await read_record(bus, RUN)).lost[subjects.ROLLOUTS]
        found = await audit(bus, RUN)
        history = await read_history(bus, RUN)
        stored = await bus.last(subjects.LEDGER, subjects.state(RUN, "trainer", "live", "main"))
        kept = {one.seq for one in history.rollouts}
        gone = [one for one in before.rollouts if one.seq not in kept]
        assert gone
        assert all(any(span.first <= one.seq <= span.last for span in lost) for one in gone)
        history.rollouts = sorted([*history.rollouts, *gone], key=lambda one: one.seq)
        assert await refold.normalizer(bus, history, run.load_config(), "sums") == []
    explained = {f"outcome of {one.seq}, where no rollout is stored" for one in gone}
    assert set(found.violations) <= explained
    assert stored is not None
    assert decode(TrainReport, stored.data).step == steps


async def test_a_store_that_is_older_as_a_whole_is_recovered_from(tmp_path: Path) -> None:
    """Beside the store, with weights over NATS, the run's folder alone knows what was there."""
    folder = tmp_path / "run"
    folder.mkdir()
    sets = {"weights.transport": "nats", "streams.weights_bytes": 64 << 20}
    with Run(folder, MANY, Supervised(folder), sets=sets) as run:
        before = await roll_back(run, None)
        async with run.servers.afterwards("older") as bus:
            older = await read_history(bus, RUN)
        assert {one.seq for one in before.rollouts} > {one.seq for one in older.rollouts}
        steps = await recover(run, subjects.LEDGER, "of LEDGER, but it ends at sequence", "LEDGER")
        async with run.servers.afterwards("audit") as bus:
            found = await audit(bus, RUN)
            report = await bus.last(subjects.LEDGER, subjects.state(RUN, "trainer", "live", "main"))
            history = await read_history(bus, RUN)
    assert found.violations == []
    assert {one.seq for one in older.rollouts} <= {one.seq for one in history.rollouts}
    assert report is not None
    assert decode(TrainReport, report.data).step == steps
