"""The normalizer of one environment: a state machine without clock, tasks or I/O.

It takes memberships ("the rollout stored at ROLLOUTS sequence s is group g"), in increasing s, and outcomes (a group's
scores, or None for a group that will never have any), in any order and any number of times. It returns groups ready to
be normalized, each with the one snapshot that belongs to it, and deltas that rebuild the state from a log.

A window holds `width` groups of the environment. It closes when no group can be added any more and every member has an
outcome; windows close in order. Groups of window k use the snapshot after window k-2. A group's snapshot and its
content are functions of the recorded sequence of the environment's groups alone, whatever the order of arrival,
redelivery, batching of `step` or restarts. Memory holds the windows that are not closed yet, and `history` closed ones
as sums.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from lachesis.pipeline.common.number_arguments import check_kind, listed
from lachesis.pipeline.errors import SettingsChangedError
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.logic.accumulator import (
    FRACTION_BITS,
    MAX_ABS_VALUE,
    MomentAccumulator,
    decay_weights,
    fold,
)
from lachesis.pipeline.normalizer.logic.bonus_fade import SuccessPeaks
from lachesis.pipeline.normalizer.logic.ranks import RankCounts, RankTable
from lachesis.pipeline.normalizer.logic.snapshot import NormalizationSnapshot
from lachesis.pipeline.normalizer.logic.stored_state_checks import saved_delta, saved_state
from lachesis.pipeline.normalizer.logic.windows import GroupWindows
from lachesis.schemas.errors import ConfigError, DataError

__all__ = [
    "DUPLICATE_WINDOWS",
    "LAG",
    "SUCCESS",
    "Columns",
    "EnvNormalizer",
    "Finish",
    "HandedOver",
    "NormalizerStep",
    "ReadyGroup",
]

LAG = 2
"""Windows between a group and the newest one its snapshot may contain."""
SUCCESS = ".success"
"""Key of a column of 1 for samples that succeeded and 0 for others: snapshots hold the highest rate there was."""
DUPLICATE_WINDOWS = 16
"""A group stored twice within so many windows is one member, at its first sequence."""
STATE_VERSION = 1
_NUMBER = (int, float)
_T = TypeVar("_T")
_MAX_VALUES_PER_STEP = 1 << 16
"""Values handed out by one step, about, so that their commit fits into a message; a group weighs 16 more."""

Columns = Mapping[str, Sequence[float | None]]
"""Values of one group: per key (reward component or rater) one value a sample, None where it is missing. Values under a
key that begins with a dot only serve statistics; they are never normalized."""


Finish = Callable[[Columns, NormalizationSnapshot], Columns]
"""A pure function; what it returns is what is handed out, and what statistics are folded of."""


class ReadyGroup(NamedTuple):
    """A group that can be normalized now: `snapshot.normalize(key, values[key])`.

    `source` is that of the outcome that counts; 0: it had none.
    """

    group: str
    seq: int
    values: Columns
    snapshot: NormalizationSnapshot
    source: int


class HandedOver(NamedTuple):
    """A group that another normalizer takes over; `dead`: it has no scores, by the outcome of source `source`.

    Where it is no `member`, that outcome came first.
    """

    group: str
    seq: int
    member: bool
    dead: bool
    source: int | None


class NormalizerStep(NamedTuple):
    """Newly ready groups in sequence order, and the state change to commit with their outputs (None: no change)."""

    ready: list[ReadyGroup]
    delta: dict[str, Any] | None


@dataclass(slots=True)
class _PendingMember:
    group: str
    resolved: bool = False
    values: Columns | None = None
    source: int | None = None


class _OutcomeAhead(NamedTuple):
    """An outcome ahead of the membership at the sequence that it names."""

    seq: int
    values: Columns | None
    source: int | None


@dataclass(slots=True)
class _Window:
    members: dict[int, _PendingMember] = field(default_factory=dict)
    unresolved: int = 0
    waiting: set[int] = field(default_factory=set)  # has values, not handed out yet


class EnvNormalizer:
    """Statistics and readiness of one environment's groups from sequence `first` on."""

    def __init__(self, env: str, config: NormalizationConfig, finish: Finish | None = None, *, first: int = 1) -> None:
        """`finish` turns a group's columns into those that count, by its snapshot. Default: as they are."""
        self.env = env
        self.config = config
        self._finish = finish
        self.duplicates = 0
        """Outcomes and memberships that were repeats of known ones, since this object was made."""
        self.unknown = 0
        """Outcomes dropped because no such member exists, since this object was made."""
        self._weights = decay_weights(config.decay, config.history)
        self._windows = GroupWindows(config.window, first)
        self._ring: dict[int, dict[str, MomentAccumulator]] = {}  # folded windows that had members
        self._ranks: dict[int, dict[str, RankCounts]] = {}  # of folded windows, for keys normalized to ranks
        self._successes = SuccessPeaks(config.history)
        self._emitted: set[int] = set()  # sequences handed out, in windows not folded
        self._folded: dict[str, int] = {}  # group -> sequence, of the last DUPLICATE_WINDOWS folded windows
        self._open: dict[int, _Window] = {}
        self._known: dict[str, int] = {}  # group -> sequence, of open windows
        # outcomes ahead of their membership, by group and in order of arrival, with those of the group behind them
        self._ahead: dict[str, list[_OutcomeAhead]] = {}
        self._tail: list[tuple[int, str]] = []  # folded groups without scores, since the last one with scores
        self._last = 0
        self._end = 0  # where another one begins, once that is known
        self._snapshots: dict[int, NormalizationSnapshot] = {}

    # -- inputs

    def member(self, seq: int, group: str) -> None:
        """Record that ROLLOUTS sequence `seq` (from 1) holds `group` of this environment.

        A repeat is ignored. Raises DataError if `seq` is new but below one already given: order carries meaning here.
        """
        if not isinstance(seq, int):
            raise DataError(f"env {self.env}: sequence is {seq!r:.80}; give the number of a stored rollout.")
        if seq < self._windows.watermark:
            return
        if seq <= self._last:
            if self._first(group, self._windows.of(seq)) is None:
                raise DataError(f"env {self.env}: {group} at sequence {seq} came after {self._last}; feed in order.")
            self.duplicates += 1
            return
        self._last = seq
        window = self._windows.next()
        if self._first(group, window) is not None:
            self.duplicates += 1
        else:
            self._windows.add(seq)
            opened = self._open.setdefault(window, _Window())
            opened.members[seq] = _PendingMember(group)
            opened.unresolved += 1
            self._known[group] = seq
        self._resolve_ahead(group)

    def resolve(self, group: str, seq: int, values: Columns | None, source: int | None = None) -> None:
        """Record a group's scores, or None if it ended without any. The first outcome of a group counts.

        Scores of a later copy are the group's too; that a copy ended without any says nothing about the first. An
        outcome that names no sequence of the group is ignored. `seq` is the group's ROLLOUTS sequence, `source` the
        sequence of this message in the stream it came from, for `oldest_source` (None: a restart need not read it
        again). Raises DataError (state untouched) on NaN, infinity, a magnitude above 1e12 or columns of different
        lengths.
        """
        if values is not None:
            values = self._checked(group, values)
        if seq < self._windows.watermark:
            self.duplicates += 1  # folded already
            return
        if seq <= self._last and group not in self._ahead:
            self._decide(group, seq, values, source)
            return
        ahead = self._ahead.setdefault(group, [])
        if all((seq, values is None) != (other.seq, other.values is None) for other in ahead):
            ahead.append(_OutcomeAhead(seq, values, source))

    @property
    def ahead(self) -> int:
        """Number of outcomes of sequences that are not known yet."""
        return sum(map(len, self._ahead.values()))

    def drop_ahead(self, source: int) -> list[tuple[str, int]]:
        """Drop the outcomes that are ahead still and came up to `source`; they count as `unknown`.

        Return group and source of each.
        """
        dropped: list[tuple[str, int]] = []
        kept: dict[str, list[_OutcomeAhead]] = {}
        for group, ahead in self._ahead.items():
            for one in ahead:
                if one.source is not None and one.source <= source:
                    dropped.append((group, one.source))
                else:
                    kept.setdefault(group, []).append(one)
        self._ahead = kept
        self.unknown += len(dropped)
        return dropped

    def _resolve_ahead(self, group: str) -> None:
        """Take in the outcomes of a group that came ahead of what is known by now, in the order in which they came."""
        ahead = self._ahead.get(group, [])
        while ahead and ahead[0].seq <= self._last:
            first = ahead.pop(0)
            self._decide(group, *first)
        if not ahead:
            self._ahead.pop(group, None)

    def _decide(self, group: str, seq: int, values: Columns | None, source: int | None) -> None:
        """Take in the outcome that names `seq`, one that was read."""
        member = self._member_at(seq)
        if member is not None and member.group == group:
            self._resolve(seq, values, source)
            return
        first = self._first(group, self._windows.of(seq))
        if first is None or seq < first or values is None:  # of no copy, or of a copy alone
            self.unknown += 1
        elif first >= self._windows.watermark:
            self._resolve(first, values, source)
        else:
            self.duplicates += 1  # folded already

    def end(self, first: int) -> list["HandedOver"]:
        """Leave groups from sequence `first` on to another normalizer, and return their known state.

        Every membership below `first` must have been given. After that all windows close, the last one included.
        """
        moved = [
            HandedOver(group, seq, member=True, dead=True, source=None) for seq, group in self._tail if seq >= first
        ]
        for window, opened in list(self._open.items()):
            for seq in [seq for seq in opened.members if seq >= first]:
                member = opened.members.pop(seq)
                opened.unresolved -= not member.resolved
                opened.waiting.discard(seq)
                if self._known.get(member.group) == seq:
                    del self._known[member.group]
                moved.append(HandedOver(member.group, seq, member=True, dead=member.resolved, source=member.source))
            if not opened.members:
                del self._open[window]
        for group, ahead in list(self._ahead.items()):
            moved += [
                HandedOver(group, one.seq, member=False, dead=True, source=one.source)
                for one in ahead
                if one.values is None and one.seq >= first
            ]
            for one in ahead:
                if one.seq < first:
                    self._decide(group, *one)
        self._ahead.clear()
        self._last = first - 1
        self._end = first
        return sorted(moved, key=lambda one: one.seq)

    def has_folded(self, seq: int, group: str) -> bool:
        """Return whether `group` at `seq` was folded here."""
        return seq < self._windows.watermark or self._folded.get(group) == seq

    def is_unresolved(self, seq: int, group: str) -> bool:
        """Whether `group`, stored at `seq`, has no outcome yet, as far as is known here."""
        member = self._member_at(seq)
        if member is not None:
            return member.group == group and not member.resolved
        return seq > self._last and not self._ahead.get(group)

    # -- output

    def step(self) -> NormalizerStep:
        """Hand out what became ready and close what can be closed. Commit the delta with the outputs.

        A backlog is handed out in several steps: call again until there is no change.
        """
        for group in [group for group, ahead in self._ahead.items() if ahead[0].seq <= self._last]:
            self._resolve_ahead(group)
        ready: list[ReadyGroup] = []
        weight = 0
        closed: list[dict[str, Any]] = []
        windows, before = self._windows, self._windows.base
        while True:
            for window in range(windows.base, windows.base + LAG):
                handed_out = self._hand_out(window)
                ready.extend(handed_out)
                weight += sum(16 + sum(map(len, item.values.values())) for item in handed_out)
            opened = self._open.get(windows.base)
            if opened is None or opened.unresolved or weight >= _MAX_VALUES_PER_STEP:
                break
            if not (self._end or windows.is_full(windows.base)):
                break
            closed.append(self._fold(windows.base, opened))
        if self._end and not self._open:
            windows.finish(self._end)
        if windows.base != before:
            self._forget()
        handed = [item.seq for item in ready if item.seq >= windows.watermark]
        if not ready and windows.base == before:
            return NormalizerStep([], None)
        delta = {
            "version": STATE_VERSION,
            "width": self.config.window,
            "base": windows.base,
            "closed": closed,
            "emitted": sorted(handed),
            "watermark": windows.watermark,
        }
        return NormalizerStep(sorted(ready, key=lambda item: item.seq), delta)

    @property
    def watermark(self) -> int:
        """Lowest ROLLOUTS sequence that is not folded: after a restart feed memberships from here on."""
        return self._windows.watermark

    def unresolved(self, last: int) -> list[tuple[int, str]]:
        """Return sequence and group of every member up to sequence `last` that has no outcome yet."""
        waiting = (window.members.items() for window in self._open.values() if window.unresolved)
        return sorted((seq, m.group) for members in waiting for seq, m in members if not m.resolved and seq <= last)

    def oldest_source(self) -> int | None:
        """Return the lowest `source` of an outcome that is not folded; None if there is none.

        After a restart feed outcomes from here on, or from after the last one read if this is None.
        """
        held = [m.source for window in self._open.values() for m in window.members.values() if m.resolved]
        held.extend(one.source for ahead in self._ahead.values() for one in ahead)
        return min((source for source in held if source is not None), default=None)

    def snapshot(self, through: int | None = None) -> NormalizationSnapshot:
        """Return the snapshot after window `through`; by default that of the newest closed window.

        Raises DataError if that window is not closed yet, or too old to be rebuilt.
        """
        newest = self._windows.base - 1
        if through is None:
            through = newest
        if not isinstance(through, int) or through > newest or (newest >= LAG and through < newest - LAG):
            raise DataError(f"window {through!r:.80}: snapshots from {newest - LAG} to {newest} exist.")
        through = max(through, -1)
        if through not in self._snapshots:
            self._snapshots[through] = self._build(through)
        return self._snapshots[through]

    def metrics(self) -> dict[str, float]:
        """Return `reward_norm/{env}/*` for monitoring: statistics of each key, and how much is waiting."""
        prefix = f"reward_norm/{self.env}"
        figures: dict[str, float] = {
            f"{prefix}/open_windows": len(self._open),
            f"{prefix}/unresolved": sum(window.unresolved for window in self._open.values()),
            f"{prefix}/duplicates": self.duplicates,
            f"{prefix}/unknown": self.unknown,
        }
        for key, stats in self.snapshot().keys.items():
            for name, value in zip(
                ("count", "mean", "std", "min", "max"),
                (stats.count, stats.mean, stats.std, stats.low, stats.high),
                strict=True,
            ):
                figures[f"{prefix}/{key.lstrip('.')}/{name}"] = value
        return figures

    # -- durable state

    def state_dict(self) -> dict[str, Any]:
        """Return the folded state (msgpack-able).

        Inputs from `watermark` on are not in it; they are fed again.
        """
        return {
            "version": STATE_VERSION,
            "env": self.env,
            "window": self.config.window,
            "base": self._windows.base,
            "ring": {str(w): {k: acc.to_list() for k, acc in keys.items()} for w, keys in self._ring.items()},
            "recent": sorted([seq, group] for group, seq in self._folded.items()),
            "emitted": sorted(self._emitted),
            "ranks": {str(w): {k: counts.to_list() for k, counts in keys.items()} for w, keys in self._ranks.items()},
            "peaks": {str(w): peak for w, peak in self._successes.peaks.items()},
            "tail": [[seq, group] for seq, group in self._tail],
            "starts": self._windows.starts(),
            "watermark": self._windows.watermark,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start from a saved state, before any input is fed.

        Raises SettingsChangedError if the state is of other windows or another build, ConfigError of another
        environment, SchemaError if it is malformed, RuntimeError if inputs were fed already.
        """
        self._require_unfed()
        saved = saved_state(state)
        if saved.env != self.env:
            raise ConfigError(f"the state is of the normalizer of environment {saved.env!r}, this is {self.env!r}.")
        self._require_same(saved.version, saved.window)
        self._windows.restore(saved.base, saved.watermark, saved.starts)
        for window, keys in saved.ring.items():
            self._ring[int(window)] = {key: MomentAccumulator.from_list(fields) for key, fields in keys.items()}
        for window, ranks in saved.ranks.items():
            self._ranks[int(window)] = {key: RankCounts.from_list(counts) for key, counts in ranks.items()}
        self._successes.peaks = {int(window): peak for window, peak in saved.peaks.items()}
        self._folded = {group: seq for seq, group in saved.recent}
        self._emitted = set(saved.emitted)
        self._tail = list(saved.tail)

    def apply(self, delta: Mapping[str, Any]) -> None:
        """Redo one committed delta, in the order of commits and before any input is fed.

        Raises SettingsChangedError if it is of other windows or another build, SchemaError if it is malformed,
        RuntimeError if inputs were fed already.
        """
        saved = saved_delta(delta)
        self._require_same(saved.version, saved.width)
        self._require_unfed()
        for part in saved.closed:
            self._ring[part.window] = {key: MomentAccumulator.from_list(f) for key, f in part.keys.items()}
            if part.ranks:
                self._ranks[part.window] = {key: RankCounts.from_list(c) for key, c in part.ranks.items()}
            self._note_success(part.window)
            self._folded.update({group: seq for seq, group in part.members})
            self._extend_tail(part.members, part.scored)
        starts = [part.members[0][0] for part in saved.closed]
        follows = saved.base == self._windows.base + len(saved.closed)  # not so where a recovery left a gap
        earlier = self._windows.starts() if follows else []
        self._windows.restore(saved.base, saved.watermark, [*earlier, *starts])
        self._emitted.update(saved.emitted)
        self._forget()

    # -- inside

    def _require_same(self, version: int, width: int) -> None:
        """Raise `SettingsChangedError` unless this build and these windows fit the stored state."""
        if version != STATE_VERSION:
            raise SettingsChangedError(
                f"environment {self.env}: another build of lachesis wrote the normalizer's state. Go on with that "
                "build, or start a new run, and set its `model` to a checkpoint of this one if you like"
            )
        if width != self.config.window:
            raise SettingsChangedError(
                f"environment {self.env}: normalization.window is {self.config.window} now, but the run's statistics "
                f"were made with {width}. Set it back to {width}; then `lachesis replay --revision NAME --set "
                f"normalization.window={self.config.window}` and `lachesis promote NAME` change it while the run goes "
                "on; or start a new run, and set its `model` to a checkpoint of this one if you like"
            )

    def _member_at(self, seq: int) -> _PendingMember | None:
        """Return the member at `seq`, if it is one of a window that is not folded."""
        opened = self._open.get(self._windows.of(seq))
        return opened.members.get(seq) if opened is not None else None

    def _first(self, group: str, window: int) -> int | None:
        """Return where `group`, seen in `window`, is a member: there or up to DUPLICATE_WINDOWS before."""
        for known in (self._known.get(group), self._folded.get(group)):
            if known is not None and 0 <= window - self._windows.of(known) <= DUPLICATE_WINDOWS:
                return known
        return None

    def _require_unfed(self) -> None:
        if self._last or self._ahead:
            raise RuntimeError("a state is rebuilt before inputs are fed; make a new EnvNormalizer.")

    def _checked(self, group: str, values: Columns) -> Columns:
        check_kind(f"what group {group} has for columns", values, Mapping)
        checked = {key: tuple(listed(f"group {group}: {key}", column)) for key, column in values.items()}
        lengths = {len(column) for column in checked.values()}
        if len(lengths) != 1 or lengths == {0}:
            raise DataError(f"group {group}: columns have lengths { {k: len(c) for k, c in checked.items()} }.")
        for key, column in checked.items():
            for i, value in enumerate(column):
                if value is not None and not (isinstance(value, _NUMBER) and abs(value) <= MAX_ABS_VALUE):
                    raise DataError(f"group {group}: {key}[{i}] is {value!r:.40}; rewards are numbers within +-1e12.")
        return checked

    def _resolve(self, seq: int, values: Columns | None, source: int | None) -> None:
        window = self._open[self._windows.of(seq)]
        member = window.members[seq]
        if member.resolved:
            self.duplicates += 1
            return
        member.resolved, member.values, member.source = True, values, source
        window.unresolved -= 1
        if values is not None and seq not in self._emitted:
            window.waiting.add(seq)

    def _hand_out(self, window: int) -> list[ReadyGroup]:
        opened = self._open.get(window)
        if opened is None or not opened.waiting:
            return []
        snapshot = self.snapshot(max(window - LAG, -1))
        ready = []
        for seq in opened.waiting:
            member = opened.members[seq]
            if member.values is not None:
                values = self._finish(member.values, snapshot) if self._finish else member.values
                ready.append(ReadyGroup(member.group, seq, values, snapshot, member.source or 0))
        self._emitted |= opened.waiting
        opened.waiting = set()
        return ready

    def _fold(self, window: int, opened: _Window) -> dict[str, Any]:
        keys: dict[str, MomentAccumulator] = {}
        ranks: dict[str, RankCounts] = {}
        for member in opened.members.values():
            values = member.values or {}
            if self._finish and values:
                values = self._finish(values, self.snapshot(max(window - LAG, -1)))
            for key, column in values.items():
                keys.setdefault(key, MomentAccumulator()).add_group(column)
                if self.config.ranks(key):
                    ranks.setdefault(key, RankCounts()).add_group(column)
        del self._open[window]
        self._windows.close(window, max(opened.members))
        self._ring[window] = keys
        if ranks:
            self._ranks[window] = ranks
        self._note_success(window)
        members = [(seq, member.group) for seq, member in opened.members.items()]
        scored = max((seq for seq, member in opened.members.items() if member.values is not None), default=0)
        self._extend_tail(members, scored)
        for seq, member in opened.members.items():
            self._folded[member.group] = seq
            if self._known[member.group] == seq:
                del self._known[member.group]
        fields = {key: acc.to_list() for key, acc in keys.items()}
        folded: dict[str, Any] = {"window": window, "keys": fields, "members": [list(member) for member in members]}
        if scored:
            folded["scored"] = scored
        if ranks:
            folded["ranks"] = {key: counts.to_list() for key, counts in ranks.items()}
        return folded

    def _note_success(self, window: int) -> None:
        """Take the success rate as of a window just folded; each success is 1, its sum in units of `quantize`."""
        if SUCCESS in self._ring[window]:
            held = {w: keys[SUCCESS] for w, keys in self._ring.items() if SUCCESS in keys}
            counts = {w: (acc.total >> FRACTION_BITS, acc.count, acc.groups) for w, acc in held.items()}
            self._successes.fold(window, counts)

    def _extend_tail(self, members: Sequence[tuple[int, str]], scored: int) -> None:
        """Take up those members of a window just folded that come after the last one with scores, at `scored`."""
        kept = [] if scored else self._tail
        self._tail = [*kept, *(member for member in members if member[0] > scored)]

    def _forget(self) -> None:
        """Drop state that no future snapshot, duplicate or repeat can refer to."""
        base = self._windows.base
        oldest = base - LAG - self.config.history
        self._ring = {w: keys for w, keys in self._ring.items() if w >= oldest}
        self._ranks = {w: ranks for w, ranks in self._ranks.items() if w >= oldest}
        self._successes.forget(base - 1 - LAG)
        self._emitted = {seq for seq in self._emitted if seq >= self._windows.watermark}
        since = base - DUPLICATE_WINDOWS
        self._folded = {group: seq for group, seq in self._folded.items() if self._windows.of(seq) >= since}
        self._windows.forget(since)
        self._snapshots = {w: s for w, s in self._snapshots.items() if w >= base - 1 - LAG}

    def _build(self, through: int) -> NormalizationSnapshot:
        folded = {key: fold(parts) for key, parts in self._reached(self._ring, through).items()}
        stats = {key: moments for key, moments in folded.items() if moments is not None}
        ranks = {key: RankTable.of(parts) for key, parts in self._reached(self._ranks, through).items()}
        return NormalizationSnapshot.build(
            self.env, through, self.config, stats, ranks, success=self._successes.after(through)
        )

    def _reached(self, windows: Mapping[int, Mapping[str, _T]], through: int) -> dict[str, list[tuple[int, _T]]]:
        """Return by key what the windows hold that a snapshot after `through` reaches back to, with their weights."""
        parts: dict[str, list[tuple[int, _T]]] = {}
        for window, keys in windows.items():
            age = through - window
            if 0 <= age < self.config.history:
                for key, part in keys.items():
                    parts.setdefault(key, []).append((self._weights[age], part))
        return dict(sorted(parts.items()))
