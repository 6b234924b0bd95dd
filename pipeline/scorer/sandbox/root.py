"""Checks whether this process is a root that can become another user.

The root of a container without other users cannot (`unshare -r`, rootless enroot, apptainer or podman), and neither can
a root without capabilities: there is no such user, or no right to change to it.
"""

import os
from pathlib import Path

__all__ = ["can_become"]

_CHOWN, _SETGID, _SETUID = 0, 6, 7
_NEEDED = 1 << _CHOWN | 1 << _SETGID | 1 << _SETUID


def can_become(uid: int, *, proc: Path = Path("/proc/self")) -> bool:
    """Return whether this process is root and can become the user and the group `uid` alone."""
    if os.getuid() != 0:
        return False
    try:
        names = ("uid_map", "gid_map", "setgroups", "status")
        users, groups, setgroups, status = (
            (proc / name).read_text(encoding="ascii", errors="replace") for name in names
        )
    except OSError:
        return True  # no such file on this machine: trying says more
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    may = int(effective, 16) & _NEEDED == _NEEDED
    return may and setgroups.strip() != "deny" and _is_mapped(uid, users) and _is_mapped(uid, groups)


def _is_mapped(uid: int, text: str) -> bool:
    """Return whether a line `first outside count` of a user namespace's map holds the user."""
    return any(int(first) <= uid < int(first) + int(count) for first, _, count in map(str.split, text.splitlines()))
