"""What is published is on disk: a power loss at any line leaves what was there before, or all of what is new."""

import pytest
import torch
from checkpoints import save_checkpoint
from power import Disk
from safetensors.torch import load_file

from lachesis.pipeline.common.fsync import fsync, make_folder, sync_tree
from lachesis.pipeline.errors import CheckpointError
from lachesis.pipeline.ledger.checkpoint_state import latest_checkpoint, state_of
from lachesis.pipeline.ledger.checkpoint_sums import verify_sums
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.tensors import policy_version
from lachesis.pipeline.model.weight_files import weights_path, write_weights
from lachesis.pipeline.offline.archive.files import whole_file
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner

pytestmark = pytest.mark.outside

CHECKPOINTS = "run/checkpoints"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def make_disk(root):
    disks = []

    def make(**options):
        disks.append(Disk(root, root.parent / "after", **options))
        return disks[-1]

    yield make
    for disk in disks:
        disk.close()


@pytest.fixture(scope="module")
def learner():
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    return policy, Learner(policy.model, LearnerConfig())


def save(root, learner, step, keep=2):
    policy, learning = learner
    learning.steps = step
    values = {"lineage": "a", "ledger_position": 41, "chain_hash": "ff", "unreported": []}
    save_checkpoint(root / CHECKPOINTS, policy, learning, keep=keep, **values)


def saved_step(folder):
    """Return the step that a trainer would go on with, None: it would start over. Raises where it could not start."""
    path = latest_checkpoint(folder / CHECKPOINTS)
    if path is None:
        return None
    verify_sums(path)
    return state_of(path).step


def save_and_check(disk, root, learner):
    """Save steps 0 to 3, of which two are kept, and lose power after each thing that is done on the way."""
    durable = None
    for step in range(4):

        def check(left, cause, expected=frozenset({durable, step})):
            assert saved_step(left) in expected, cause

        with disk.watching(check):
            save(root, learner, step)
        for names in ("synced", "all"):
            assert saved_step(disk.after_power_loss(names)) == step, "the checkpoint was said to be durable"
        durable = step


@pytest.mark.slow
def test_a_power_loss_at_any_line_leaves_the_checkpoint_before_or_the_new_one(root, learner, make_disk):
    disk = make_disk()
    save_and_check(disk, root, learner)


def test_everything_in_a_checkpoint_is_synced_before_it_gets_its_name_and_its_name_before_it_is_pointed_to(
    root, learner, make_disk
):
    disk = make_disk()
    with disk.watching():
        save(root, learner, 7)
    name = "step-00000007"
    files = {path.name for path in (root / CHECKPOINTS / name).iterdir()}
    assert {"model.safetensors", "optimizer.safetensors", "trainer.json", "B3SUMS"} <= files
    partial = f"{CHECKPOINTS}/.partial-{name}"
    assert disk.events[:2] == [("fsync", "."), ("fsync", "run")]  # the names of the folders that were made
    assert set(disk.events[2 : 2 + len(files)]) == {("fsync", f"{partial}/{file}") for file in files}
    assert disk.events[2 + len(files) :] == [
        ("fsync", partial),
        ("rename", f"{CHECKPOINTS}/{name}"),
        ("fsync", CHECKPOINTS),
        ("fsync", f"{CHECKPOINTS}/.latest.partial"),
        ("rename", f"{CHECKPOINTS}/latest"),
        ("fsync", CHECKPOINTS),
    ]


@pytest.mark.parametrize(
    "forgotten", ["model.safetensors", "optimizer.safetensors", "trainer.json", "B3SUMS", ".latest.partial"]
)
def test_a_file_that_is_not_synced_is_noticed(root, learner, forgotten, make_disk):
    disk = make_disk(skip=lambda path: path.name == forgotten)
    with pytest.raises((AssertionError, CheckpointError)):
        save_and_check(disk, root, learner)


@pytest.mark.parametrize("forgotten", ["checkpoints", "run", ".partial-step-00000000", "disk"])
def test_a_folder_that_is_not_synced_is_noticed(root, learner, forgotten, make_disk):
    disk = make_disk(skip=lambda path: path.name == forgotten)
    with pytest.raises((AssertionError, CheckpointError)):
        save_and_check(disk, root, learner)


def test_weights_have_their_name_only_once_they_are_whole(root, make_disk):
    tensors = {"weight": torch.arange(64.0)}
    version = policy_version(3, "a", tensors)
    folder = root / "run" / "weights"

    def check(left, cause):
        path = weights_path(left / "run" / "weights", version)
        assert not path.exists() or torch.equal(load_file(path)["weight"], tensors["weight"]), cause

    disk = make_disk()
    with disk.watching(check):
        path = write_weights(tensors, folder, version)
    assert [kind for kind, _ in disk.events] == ["fsync", "fsync", "fsync", "rename", "fsync"]
    for names in ("synced", "all"):
        assert weights_path(disk.after_power_loss(names) / "run" / "weights", version).stat().st_size > 0
    assert disk.events[-2:] == [("rename", f"run/weights/{path.name}"), ("fsync", "run/weights")]


@pytest.mark.parametrize("forgotten", ["partial", "weights"])
def test_weights_that_are_not_synced_are_noticed(root, forgotten, make_disk):
    tensors = {"weight": torch.arange(64.0)}
    version = policy_version(3, "a", tensors)
    disk = make_disk(skip=lambda path: path.name.endswith(forgotten))
    with disk.watching():
        write_weights(tensors, root / "run" / "weights", version)
    whole = []
    for names in ("synced", "all"):
        path = weights_path(disk.after_power_loss(names) / "run" / "weights", version)
        whole.append(path.exists() and path.stat().st_size > 0)
    assert not all(whole)


def test_an_export_replaces_the_file_before_it_only_once_it_is_whole(root, make_disk):
    file = root / "export.jsonl"
    file.write_bytes(b"old")
    disk = make_disk()
    with disk.watching():
        fsync(file)

    def check(left, cause):
        content = (left / "export.jsonl").read_bytes() if (left / "export.jsonl").exists() else None
        assert content in {b"old", b"new", None}, cause
        assert content is not None or "synced" in cause  # its folder had not been synced before

    with disk.watching(check), whole_file(file, overwrite=True) as out:
        out.write(b"new")
    assert disk.events[1:] == [("fsync", "export.jsonl.partial"), ("rename", "export.jsonl"), ("fsync", ".")]
    for names in ("synced", "all"):
        assert (disk.after_power_loss(names) / "export.jsonl").read_bytes() == b"new"


def test_folders_that_are_made_keep_their_names(root, make_disk):
    disk = make_disk()
    with disk.watching():
        make_folder(root / "a" / "b" / "c")
        make_folder(root / "a" / "b" / "c")
    assert disk.events == [("fsync", "."), ("fsync", "a"), ("fsync", "a/b")]
    assert (disk.after_power_loss("synced") / "a" / "b" / "c").is_dir()


def test_a_tree_is_synced_from_its_files_up(root, make_disk):
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_bytes(b"x")
    disk = make_disk()
    with disk.watching():
        sync_tree(root / "a")
    assert set(disk.events) == {("fsync", "a"), ("fsync", "a/b"), ("fsync", "a/b/file")}
