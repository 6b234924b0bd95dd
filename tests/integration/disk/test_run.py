"""A real run whose streams, checkpoints and logs lie on one disk, which becomes full: it is said within seconds, no
process ends, and the run goes on by itself once there is room, with nothing lost or trained twice."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from integration.audit import audit
from integration.harness import RUN, Run, alive, until
from integration.servers import Supervised

from lachesis.pipeline.ledger.checkpoint_state import latest_checkpoint
from lachesis.pipeline.ledger.checkpoint_sums import verify_sums

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MANY = 1_000_000


def _said(run: Run, text: str) -> bool:
    return text in (run.folder / "up.log").read_text(errors="replace")


async def _command(run: Run, *command: str) -> subprocess.CompletedProcess[bytes]:
    return await anyio.run_process(
        [sys.executable, "-m", "lachesis", *command, *run.arguments], check=False, env=run.environ
    )


async def _until_shown(run: Run, *any_of: str) -> None:
    """Wait until `status` shows one of the texts, as it does once a service has met the full disk and reported it."""
    with anyio.fail_after(120):
        shown = ""
        while not any(text in shown for text in any_of):
            shown = (await _command(run, "status")).stdout.decode()


async def test_a_run_waits_for_room_on_its_disk_and_goes_on(small_disk) -> None:
    disk = small_disk(256)
    folder = disk.path / "run"
    folder.mkdir()
    with Run(folder, MANY, Supervised(folder)) as run:
        run.start()
        await run.wait_for_step(5)
        before = run.pids()

        disk.fill()
        await until(lambda: _said(run, f"the disk that holds {folder / 'nats'} is full"), 60)
        await until(lambda: _said(run, "no message is taken any more by"), 60)
        for command in ("status", "top", "health"):
            arguments = ["--once", "--window", "3"] if command == "top" else []
            shown = await _command(run, command, *arguments)
            assert b"is full" in shown.stdout + shown.stderr, command
        await _until_shown(run, "the disk is full: at least", "leaves this unanswered: its disk is or was full")
        assert "FAIL" in (await _command(run, "doctor", "--json")).stdout.decode()
        for name in ("trainer", "scorer", "batcher", "nats-server"):  # what starts meanwhile waits as well
            disk.fill()
            os.kill(run.pids()[name], signal.SIGKILL)
        stopped = run.step()
        assert run.process is not None
        assert run.process.poll() is None
        untouched = before.keys() - {"trainer", "scorer", "batcher", "nats-server"}
        assert all(alive(before[name]) for name in untouched)

        disk.free()
        await run.wait_for_step(stopped + 8)
        assert all(run.pids()[name] == before[name] for name in untouched)
        assert not _said(run, "Traceback")
        for file in (folder / "logs").glob("*.log"):
            assert "Traceback" not in file.read_text(errors="replace"), file.name
        checkpoint = latest_checkpoint(folder / "checkpoints")
        assert checkpoint is not None
        verify_sums(checkpoint)
    assert not [path for path in folder.rglob("*partial*") if path.name != "ballast"]
    async with run.servers.afterwards("audit") as bus:
        found = await audit(bus, RUN)
    assert found.violations == []
    assert found.batches > stopped


async def test_a_run_whose_checkpoints_lie_on_a_full_disk_of_their_own_goes_on(small_disk, tmp_path: Path) -> None:
    disk = small_disk(64)
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("checkpoints", "weights"):
        (disk.path / name).mkdir()
        (folder / name).symlink_to(disk.path / name)
    with Run(folder, MANY, Supervised(folder)) as run:
        run.start()
        await run.wait_for_step(2)
        disk.fill()
        log = folder / "logs" / "trainer.log"
        await until(lambda: f"bytes missing to write {folder}" in log.read_text(errors="replace"), 60)
        trainer = run.pids()["trainer"]
        await _until_shown(run, "the disk is full: at least")
        stopped = run.step()
        disk.free()
        await run.wait_for_step(stopped + 8)
        assert run.pids()["trainer"] == trainer
    async with run.servers.afterwards("audit") as bus:
        assert (await audit(bus, RUN)).violations == []


@pytest.mark.parametrize("left", [0, 256 << 10])
async def test_a_run_that_waits_for_room_at_its_start_can_be_stopped(small_disk, tmp_path: Path, left: int) -> None:
    """For its own files, or for its server's."""
    disk = small_disk(4)
    disk.fill(leave=left)
    folder = disk.path / "run"
    with Run(tmp_path, MANY, Supervised(folder), sets={"folder": folder}) as run:
        run.start()
        await until(lambda: _said(run, "the disk is full: at least"), 120)
        assert run.process is not None
        run.process.terminate()
        try:
            assert await run.wait(60) == 0, run.tail()
        finally:
            run.process.kill()
    assert not _said(run, "Traceback")
