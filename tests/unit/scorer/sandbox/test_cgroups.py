"""Which control groups are found, in trees as the kernel shows them."""

from pathlib import Path

import pytest

from lachesis.pipeline.scorer.sandbox import cgroups


class Tree:
    """A folder that makes files in each new group, as the kernel does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.own, self.files = folder, folder / "own", {}
        make, remove = Path.mkdir, Path.rmdir

        def made(path: Path, *args: object, **options: object) -> None:
            make(path, *args, **options)
            for file in self.files.get(path.parent, ()):
                (path / file).touch()

        def removed(path: Path) -> None:
            for file in path.iterdir():
                file.unlink()
            remove(path)

        monkeypatch.setattr(Path, "mkdir", made)
        monkeypatch.setattr(Path, "rmdir", removed)

    def find(self, own: str) -> object:
        self.own.write_text(own)
        return cgroups.find_groups(100, 9, mounts=self.folder / "mounts", own=self.own)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_version_2_beside_its_own_group_if_not_below_it(tree: Tree) -> None:
    here = tree.folder / "mounts/user.slice/app.scope"
    here.mkdir(parents=True)
    tree.files = {here: ["cgroup.procs"], here.parent: ["memory.max", "memory.swap.max", "pids.max"]}
    expected = {"memory.max": "100", "memory.swap.max": "0", "pids.max": "9", "memory.oom.group": "1"}
    assert tree.find("0::/user.slice/app.scope\n") == [(str(here.parent), expected)]
    assert not list(here.parent.glob("lachesis-*"))
    tree.files = {}
    assert "have no memory.max, pids.max" in str(tree.find("0::/user.slice/app.scope\n"))


def test_version_1_has_a_folder_for_each_controller(tree: Tree) -> None:
    memory, pids = tree.folder / "mounts/memory/a", tree.folder / "mounts/pids"
    memory.mkdir(parents=True)
    pids.mkdir()
    tree.files = {memory: ["memory.limit_in_bytes"], pids: ["pids.max"]}
    found = tree.find("8:pids:/\n4:memory:/a\n0::/\n")
    assert found == [(str(memory), {"memory.limit_in_bytes": "100"}), (str(pids), {"pids.max": "9"})]


def test_without_any_it_says_why(tree: Tree) -> None:
    assert "No such file" in str(tree.find("0::/gone\n"))
    assert "No such file" in str(tree.find("8:cpuset:/\n"))


def test_groups_of_dead_launchers_are_removed(tree: Tree) -> None:
    mounts = tree.folder / "mounts"
    for name in ("lachesis-999999999", "lachesis-1"):  # process 1 lives
        (mounts / name).mkdir(parents=True)
    tree.files = {mounts: ["memory.max", "pids.max"]}
    assert isinstance(tree.find("0::/\n"), list)
    assert [path.name for path in mounts.glob("lachesis-*")] == ["lachesis-1"]
