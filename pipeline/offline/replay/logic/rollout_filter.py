"""Selects a replay's rollouts by planning headers and times, and compares revisions. Pure."""

import hashlib
from collections.abc import Collection, Iterable

import msgspec
from msgspec import Struct

from lachesis.schemas.errors import ConfigError
from lachesis.schemas.ids import is_group_id
from lachesis.schemas.planning_header import Plan
from lachesis.schemas.replay import Selection

__all__ = ["differences", "group_list", "groups_digest", "selects"]

_REVISION = ("selection", "judges", "normalization", "normalizations", "advantage")


def selects(selection: Selection, groups: Collection[str] | None, plan: Plan, seq: int, time_ns: int) -> bool:
    """Return whether the selection includes the rollout of `plan`, stored at `seq` and `time_ns`.

    `groups` is the list that `selection.groups` is the digest of.
    """
    return (
        _within(seq, selection.first_seq, selection.last_seq)
        and _within(time_ns, selection.since_ns, selection.until_ns)
        and _within(plan.policy_step, selection.min_step, selection.max_step)
        and (groups is None or plan.group in groups)
    )


def _within(value: int, low: int | None, high: int | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def group_list(text: str) -> frozenset[str]:
    """Return the group ids in `text`, one a line; empty lines and what follows a `#` do not count.

    Raises `ConfigError` on a line that is no group id, and where there is none.
    """
    found = set()
    for number, line in enumerate(text.splitlines(), 1):
        name = line.partition("#")[0].strip()
        if name and not is_group_id(name):
            raise ConfigError(f"line {number}: {name[:60]!r} is no group id; they have 32 hex digits")
        found |= {name} if name else set()
    if not found:
        raise ConfigError("the list of groups is empty")
    return frozenset(found)


def groups_digest(groups: Iterable[str]) -> str:
    """Return what names a list of groups, whatever its order."""
    return hashlib.blake2b("\n".join(sorted(groups)).encode(), digest_size=12).hexdigest()


def differences(old: Struct, new: Struct, names: Iterable[str] = _REVISION) -> list[str]:
    """Return in words where two definitions differ in the fields `names`; nothing if they do not.

    The fields are, unless named, what the scores and rewards of a revision depend on.
    """
    found: list[str] = []
    for name in names:
        _differ(name, msgspec.to_builtins(getattr(old, name)), msgspec.to_builtins(getattr(new, name)), found)
    return found


def _differ(path: str, old: object, new: object, found: list[str]) -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            _differ(f"{path}.{key}", old.get(key), new.get(key), found)
    elif old != new:
        found.append(f"{path} was {old!r:.80}, is {new!r:.80}")
