"""What is free: the least of the machine and of the control groups that a process is in."""

from pathlib import Path

from lachesis.pipeline.common.machine_memory import MemoryKills, _free_in_groups, out_of_memory_kills


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


def test_limits_of_version_1_count_as_well_and_in_a_container_its_own_is_at_the_root(tmp_path: Path) -> None:
    root, memory = tmp_path / "root", tmp_path / "root" / "memory"
    inner = memory / "docker" / "container"
    inner.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("11:cpu,cpuacct:/docker/container\n9:memory:/docker/container\n0::/\n")

    def limit(folder: Path, limit: int, used: int, cached: int) -> None:
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cached}\n")

    limit(inner, 1000, 700, 50)
    limit(memory, 0x7FFFFFFFFFFFF000, 900, 0)
    assert min(_free_in_groups(root, own)) == 350
    own.write_text("9:memory:/not/seen/from/here\n")
    limit(memory, 600, 500, 10)
    assert list(_free_in_groups(root, own)) == [110]


def test_the_kernel_s_count_of_kills_never_falls() -> None:
    first = out_of_memory_kills()
    assert 0 <= first <= out_of_memory_kills()


def test_a_kill_for_lack_of_memory_explains_only_what_ends_just_then() -> None:
    counts = [5]
    kills = MemoryKills(lambda: counts[-1])
    kills.poll(1.0)
    assert not kills.were_just_now(1.5)
    counts.append(6)
    assert kills.were_just_now(2.0)
    kills.poll(3.0)
    assert not kills.were_just_now(900.0), "it was a neighbour, a quarter of an hour ago"
