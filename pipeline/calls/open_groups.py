"""Tells from headers which groups are under way, where their records lie, and which are left behind.

Pure. The governor keeps one: it decides which process may take up a group, and below which sequence calls are of no
use.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.schemas.calls import CALL_HEADER, CallKey
from lachesis.schemas.errors import SchemaError

__all__ = ["RESERVATION_S", "OpenGroups"]

_MAX_GROUPS = 4096
"""Groups under way that are remembered for an environment; beyond this, the oldest cannot be taken up any more."""
RESERVATION_S = 30.0
"""Seconds that a process has to start with a group that it was given, until another one may take it up."""
_MAX_RECORDS = 65_536
"""Records of one group that are remembered; a group with more cannot be taken up."""


@dataclass(slots=True)
class _OpenGroup:
    holder: str
    life: int
    lease: str | None
    last_ns: int
    seqs: list[int] = field(default_factory=list)
    promised_s: float | None = None
    """When a process was given it to take up, which its start will say."""

    @property
    def first(self) -> int:
        return self.seqs[0]


class OpenGroups:
    """Feed it the headers of CALLS in stream order. `is_leased`: whether a lease of an environment is held."""

    def __init__(self, is_leased: Callable[[str, str], bool]) -> None:
        self._is_leased = is_leased
        self._groups: dict[str, dict[str, _OpenGroup]] = {}  # by environment and group, in the order of their starts
        self._ends: dict[str, int] = {}  # by environment: the last sequence seen
        self.dropped = 0
        """Groups that were given up because they were left behind for long, or for lack of room."""

    def apply_message(self, message: StoredMessage) -> None:
        """Record a message of CALLS by its headers."""
        try:
            key = CallKey.unpack(message.headers.get(CALL_HEADER))
        except SchemaError:
            key = None
        self.apply(message.seq, message.subject.rsplit(".", 1)[-1], key, message.time_ns)

    def apply(self, seq: int, env: str, key: CallKey | None, time_ns: int) -> None:
        """Record the message at `seq`; `key` None: it cannot be read, and is no part of any group."""
        self._ends[env] = seq
        if key is None:
            return
        groups = self._groups.setdefault(env, {})
        group = groups.get(key.group)
        if key.kind == "end":
            groups.pop(key.group, None)
        elif key.kind == "start":
            holder = key.holder or ""
            if group is None:
                groups[key.group] = _OpenGroup(holder, key.life, key.lease, time_ns, [seq])
                if len(groups) > _MAX_GROUPS:
                    self._drop(env, next(iter(groups)))
            elif key.life >= group.life:
                group.holder, group.life, group.lease, group.promised_s = holder, key.life, key.lease, None
        if group is not None and key.kind != "end":
            group.last_ns = time_ns
            group.seqs.append(seq)
            if len(group.seqs) > _MAX_RECORDS:
                self._drop(env, key.group)

    def assign(self, env: str, holder: str, life: int, now_s: float) -> str | None:
        """Return a group of `env` that its process has left behind, and promise it to `holder` in `life`.

        That is a group of an earlier life of the same holder, or one whose lease is held no more. None: there is
        none.
        """
        for name, group in self._groups.get(env, {}).items():
            if self._is_free(env, group, now_s, holder, life):
                group.promised_s = now_s
                return name
        return None

    def count_free(self, env: str, now_s: float, holder: str = "", life: int = 0) -> int:
        """Return how many groups of `env` any process may take up, or `holder` in its `life`."""
        return sum(self._is_free(env, group, now_s, holder, life) for group in self._groups.get(env, {}).values())

    def settle(self, env: str, group: str) -> None:
        """Record that a group is stored as a rollout.

        No process goes on with it, also if its own left no end of it.
        """
        self._groups.get(env, {}).pop(group, None)

    def records(self, env: str, group: str, after: int) -> list[int]:
        """Return the sequences of a group's records behind `after`; none if it is not under way."""
        found = self._groups.get(env, {}).get(group)
        return [] if found is None else [seq for seq in found.seqs if seq > after]

    def lowest(self, env: str) -> int:
        """Return the sequence below which the calls of `env` are of no use any more."""
        firsts = [group.first for group in self._groups.get(env, {}).values()]
        return min(firsts) if firsts else self._ends.get(env, 0) + 1

    def environments(self) -> Iterator[str]:
        """Yield the environments of which any record was seen."""
        return iter(tuple(self._ends))

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def drop_older(self, before_ns: int) -> None:
        """Give up the groups without a record since Unix time `before_ns`."""
        for env, groups in self._groups.items():
            for name in [name for name, group in groups.items() if group.last_ns < before_ns]:
                self._drop(env, name)

    def drop_oldest(self, *, leased: bool) -> bool:
        """Give up a group for lack of room: the oldest of those left behind; False: there is none.

        `leased`: without any of those, one that a process works on.
        """
        found = [
            (self._is_held(env, group), group.first, env, name)
            for env, groups in self._groups.items()
            for name, group in groups.items()
        ]
        is_held, _, env, name = min(found, default=(True, 0, "", ""))
        if not name or (is_held and not leased):
            return False
        self._drop(env, name)
        return True

    def _drop(self, env: str, name: str) -> None:
        del self._groups[env][name]
        self.dropped += 1

    def _is_free(self, env: str, group: _OpenGroup, now_s: float, holder: str, life: int) -> bool:
        if group.promised_s is not None and now_s - group.promised_s < RESERVATION_S:
            return False
        return (group.holder == holder and group.life < life) or not self._is_held(env, group)

    def _is_held(self, env: str, group: _OpenGroup) -> bool:
        return group.lease is not None and self._is_leased(env, group.lease)
