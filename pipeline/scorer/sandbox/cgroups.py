"""Finds where this process may create control groups, and their memory and process limits."""

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["GroupLimits", "find_groups"]

GroupLimits = tuple[str, dict[str, str]]
"""A folder in which groups can be made, and the limits of each: file -> value, in the order to write them."""


def find_groups(
    memory_bytes: int, processes: int, *, mounts: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> list[GroupLimits] | str:
    """Return the folders, for version 2 or version 1 of control groups; or, in words, why there are none."""
    memory = str(memory_bytes)
    try:
        paths = dict(_parsed(line) for line in own.read_text().splitlines())
    except OSError as error:
        return str(error)
    tried = []
    for root in (mounts, mounts / "unified"):  # the second where both versions are in use
        here = root / paths.get("", "/").lstrip("/")
        for parent in (here, here.parent) if here != root else (here,):
            wanted = {"memory.max": memory, "memory.swap.max": "0", "pids.max": str(processes)}
            found = _offered(parent, wanted, optional="memory.swap.max")
            if isinstance(found, dict):
                return [(str(parent), found | {"memory.oom.group": "1"})]
            tried.append(found)
    first = []
    for controller, wanted, optional in (
        (
            "memory",
            {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
            "memory.memsw.limit_in_bytes",
        ),
        ("pids", {"pids.max": str(processes)}, ""),
    ):
        if controller not in paths:
            return tried[0]
        parent = mounts / controller / paths[controller].lstrip("/")
        found = _offered(parent, wanted, optional)
        if isinstance(found, str):
            return found
        first.append((str(parent), found))
    return first


def _parsed(line: str) -> tuple[str, str]:
    """Return controller and path of a line like `4:memory:/a/b`; version 2 has no controller."""
    _, controllers, path = line.split(":", 2)
    return controllers, path


def _offered(parent: Path, wanted: dict[str, str], optional: str) -> dict[str, str] | str:
    """Return the limits that a group made in `parent` has, or why none can be made or lacks one."""
    probe = parent / f"lachesis-probe-{os.getpid()}"
    try:
        probe.mkdir()
        _sweep(parent)
    except OSError as error:
        return str(error)
    try:
        offered = {file: value for file, value in wanted.items() if (probe / file).exists()}
    finally:
        probe.rmdir()
    missing = sorted(set(wanted) - set(offered) - {optional})
    return f"groups in {parent} have no {', '.join(missing)}" if missing else offered


def _sweep(parent: Path) -> None:
    """Remove the groups of launchers that were killed."""
    for group in parent.glob("lachesis-[0-9]*"):
        if not Path("/proc", group.name.rpartition("-")[2]).exists():
            with suppress(OSError):  # another scorer was faster
                group.rmdir()
