"""What is free: the least of the machine and of the control groups that a process is in."""

from pathlib import Path

from lachesis.pipeline.common.machine_memory import _free_in_groups


def test_what_the_limits_of_control_groups_leave(tmp_path: Path) -> None:
    root, inner = tmp_path / "root", tmp_path / "root" / "pod" / "container"
    inner.mkdir(parents=True)
    for folder, limit, used, cached in ((inner.parent, "max", 900, 0), (inner, "1000", 700, 250)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    own = tmp_path / "own"
    own.write_text("4:memory:/other\n0::/pod/container\n")
    assert list(_free_in_groups(root, own)) == [550]
    (inner.parent / "memory.max").write_text("1200")
    assert list(_free_in_groups(root, own)) == [550, 300]
    (inner / "memory.current").write_text("5000")
    assert min(_free_in_groups(root, own)) == 0
    own.write_text("4:memory:/other\n")
    assert list(_free_in_groups(root, own)) == []
    assert list(_free_in_groups(root, tmp_path / "none")) == []
