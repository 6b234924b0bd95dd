"""Ten times the history takes no more memory, on the way out or in."""

import os
import subprocess
from pathlib import Path

import anyio
import pytest
from integration.archive.world import World, a_group, a_world

GROUPS = 10_000
MOST_GROWTH = 48 << 20
"""Bytes of resident memory; all of it as rows would take half a gigabyte."""


async def peak(process: subprocess.Popen[bytes]) -> int:
    """Return the most resident memory that a process had, in bytes, once it has ended well."""
    _, status, usage = await anyio.to_thread.run_sync(os.wait4, process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.communicate()
    process.communicate()
    return usage.ru_maxrss * 1024


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_memory_does_not_grow_with_history(tmp_path: Path) -> None:
    files: dict[str, tuple[Path, Path]] = {}
    async with a_world(tmp_path / "here") as world:
        for start in range(1, GROUPS + 1, 100):
            async with anyio.create_task_group() as tasks:
                for n in range(start, start + 100):
                    tasks.start_soon(world.store, a_group(n, samples=8, tokens=64))
        for kind in ("jsonl", "parquet"):
            few, many = files[kind] = tmp_path / f"few.{kind}", tmp_path / f"many.{kind}"
            base = await peak(world.start("export", few, "--to-seq", GROUPS // 10))
            grown = await peak(world.start("export", many)) - base
            print(f"export {kind}: {base >> 20} MiB for {GROUPS // 10} groups, {grown >> 20} MiB more for {GROUPS}, "
                  f"{many.stat().st_size >> 20} MiB of file")  # fmt: skip
            assert grown < MOST_GROWTH
    for kind, (few, many) in files.items():
        async with a_world(tmp_path / f"there-{kind}") as there:
            base = await peak(World(there.folder, there.bus).start("import", few, "--unleased"))
            grown = await peak(there.start("import", many, "--unleased")) - base
            print(f"import {kind}: {base >> 20} MiB, {grown >> 20} MiB more")
            assert grown < MOST_GROWTH
            assert (await there.bus.usage("ROLLOUTS")).messages == GROUPS
