"""What a run writes besides its streams, on a real disk that is full: nothing half written passes for whole, nothing is
left behind, and all is written once there is room."""

import io
import sys
from functools import partial
from pathlib import Path

import anyio
import pytest
import torch
from checkpoints import save_checkpoint

from lachesis.pipeline.common.disk import SHORTAGES, DeferredFile, is_disk_full, write_when_room
from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.late_output import keep_output
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.ledger.checkpoint_state import latest_checkpoint
from lachesis.pipeline.ledger.checkpoint_sums import verify_sums
from lachesis.pipeline.model.policy import PolicyModel, build_tiny_policy
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.model.weight_files import read_weights, weights_path, write_weights
from lachesis.pipeline.trainer.checkpoint import CheckpointContent, load_checkpoint
from lachesis.pipeline.trainer.checkpoint_folder import only_writer
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.tracking import METRICS_FILE, append_row, open_tracking


@pytest.fixture
def policy() -> PolicyModel:
    return build_tiny_policy(0, width=64, layers=2, heads=2, max_length=64)


async def waiting() -> None:
    """Wait until something waits for room."""
    with anyio.fail_after(60):
        while SHORTAGES.longest_wait_text is None:  # noqa: ASYNC110
            await anyio.sleep(0.01)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


async def test_a_checkpoint_waits_for_room_and_the_one_before_stays_the_latest(small_disk, policy: PolicyModel) -> None:
    disk = small_disk(16)
    folder = disk.path / "checkpoints"
    learner = Learner(policy.model, LearnerConfig())
    save = partial(
        save_checkpoint, folder, policy, learner, lineage="a", ledger_position=1, chain_hash="0" * 64, unreported=[]
    )
    save()
    before = files(folder)
    learner.steps = 1
    whole = CheckpointContent.of(policy, learner).nbytes
    for room in (0, 20_000, whole + 4096):  # fails sooner and later, down to the last file
        disk.fill(leave=room)
        with pytest.raises(Exception, match=r"No space left|os error 28") as caught:
            save()
        assert is_disk_full(caught.value)
        assert files(folder) == before
        assert load_checkpoint(latest_checkpoint(folder), LearnerConfig()).state.step == 0
        disk.free()
    disk.fill(leave=2 * whole - 1)  # enough, but nothing for others
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(write_when_room, folder, save, needed_bytes=whole))
        await waiting()
        assert str(folder) in str(SHORTAGES.longest_wait_text)
        assert files(folder) == before
        disk.free()
    latest = latest_checkpoint(folder)
    assert latest is not None
    verify_sums(latest)
    assert latest.name == "step-00000001"
    assert not any(".partial" in name for name in files(folder))


async def test_weights_wait_for_room(small_disk, policy: PolicyModel) -> None:
    disk = small_disk(16)
    tensors = policy_tensors(policy.model)
    version = policy_version(1, "a", tensors)
    folder = disk.path / "weights"
    folder.mkdir()
    (folder / ".0-a-1.safetensors.17.partial").write_bytes(b"of a trainer that was killed")
    disk.fill(leave=10_000)
    with pytest.raises(OSError, match="Errno 28"):
        write_weights(tensors, folder, version)
    assert files(folder) == set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            write_when_room, weights_path(folder, version), partial(write_weights, tensors, folder, version)
        )
        await waiting()
        disk.free()
    found = read_weights(weights_path(folder, version), version, tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


async def test_figures_wait_for_room_and_no_row_is_torn(small_disk) -> None:
    disk = small_disk(1)
    config = RunConfig(folder=str(disk.path / "run"))
    async with open_tracking(config.path, config.training.sample_rows) as tracking:
        await tracking.resume(0)
        await tracking.log({"train/step": 1.0})
        disk.fill()
        row = {"train/step": 2.0} | {f"figure/{number}": 0.5 for number in range(2000)}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tracking.log, row)
            await waiting()
            assert (config.path / METRICS_FILE).read_bytes() == b'{"train/step":1.0}\n'
            disk.free()
        await tracking.log({"train/step": 3.0})
    disk.fill(leave=8192)
    before = (config.path / METRICS_FILE).read_bytes()
    with pytest.raises(OSError, match="No space left"):
        append_row(config.path / METRICS_FILE, bytes(60_000))  # what is there is less than it seemed
    assert (config.path / METRICS_FILE).read_bytes() == before
    rows = (config.path / METRICS_FILE).read_bytes().splitlines()
    assert [row[:17] for row in rows] == [f'{{"train/step":{step}.0'.encode() for step in (1, 2, 3)]


def test_small_files_are_whole_or_as_they_were(small_disk) -> None:
    disk = small_disk(1)
    secret, pids = disk.path / "endpoint.json", disk.path / "pids.json"
    late = DeferredFile(pids)
    replace_file(secret, b"before", private=True)
    late.write(b"before")
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        replace_file(secret, bytes(9000), private=True)
    late.write(bytes(9000))
    assert secret.read_bytes() == pids.read_bytes() == b"before"
    assert files(disk.path) == {"endpoint.json", "pids.json", "ballast"}
    disk.free()
    late.retry()
    assert pids.read_bytes() == bytes(9000)


def test_a_folder_is_held_on_a_full_disk(small_disk) -> None:
    disk = small_disk(1)
    with only_writer(disk.path / "checkpoints"):
        pass
    disk.fill()
    with only_writer(disk.path / "checkpoints"):
        assert disk.free_bytes() == 0


def test_lines_on_a_full_disk_are_written_later(small_disk, monkeypatch) -> None:
    disk = small_disk(1)
    with (disk.path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stdout", io.StringIO())  # which has no descriptor, and stays as it is
        monkeypatch.setattr(sys, "stderr", log)
        keep_output()
        print("before", file=sys.stderr)
        disk.fill()
        for number in range(1000):
            print(f"line {number}", file=sys.stderr, flush=True)
        disk.free()
        sys.stderr.flush()
    lines = (disk.path / "log").read_text().splitlines()
    assert lines == ["before", *(f"line {number}" for number in range(1000))]
