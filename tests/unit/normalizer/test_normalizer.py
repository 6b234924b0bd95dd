"""One environment's normalizer: the same bits for any order of arrival, redelivery, batching and restart."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.pipeline.errors import SettingsChangedError
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.logic import bonus_fade
from lachesis.pipeline.normalizer.logic import ranks as ranks_module
from lachesis.pipeline.normalizer.logic.normalizer import DUPLICATE_WINDOWS, SUCCESS, EnvNormalizer, ReadyGroup
from lachesis.pipeline.normalizer.logic.snapshot import NormalizationSnapshot
from lachesis.schemas.errors import ConfigError, DataError, SchemaError

SMALL = NormalizationConfig(window=4, warmup_samples=4, warmup_groups=2, history=3)
RANKS = msgspec.structs.replace(SMALL, mode="minmax", bounds={"format": (0.0, 1.0)})


def history(rng, groups, gap=3, dead=0.1, copies=0.1):
    """Return [(seq, group, columns or None)]: gaps in the sequence, copies, missing values, dead groups."""
    out, seq = [], 0
    for i in range(groups):
        if out and rng.random() < copies:  # a copy of an earlier group, at a sequence of its own
            seq += rng.randint(1, gap)
            out.append((seq, *rng.choice(out[-5:])[1:]))
        seq += rng.randint(1, gap) if rng.random() < 0.95 else rng.randint(1, 40)
        columns = {
            "reward": [None if rng.random() < 0.1 else rng.gauss(3, 2) for _ in range(4)],
            "format": [rng.random() for _ in range(4)],
            SUCCESS: [float(rng.random() < i / 60) for _ in range(4)],
        }
        out.append((seq, f"g{i}", None if rng.random() < dead else columns))
    return out


def digest(ready: ReadyGroup):
    normalized = {key: ready.snapshot.normalize(key, column) for key, column in ready.values.items()}
    return ready.seq, ready.snapshot.id, msgspec.json.encode(normalized)


def finish(columns, snapshot):
    """What counts is moved by what the snapshot knows: folded sums then depend on it."""
    known = snapshot.keys["reward"].mean if "reward" in snapshot.keys else 0.0
    return {**columns, "reward": [None if x is None else x + known / 2 for x in columns["reward"]]}


def in_order(events, config=SMALL, finish=None):
    norm = EnvNormalizer("e", config, finish)
    got = {}
    for seq, group, columns in events:
        norm.member(seq, group)
        norm.resolve(group, seq, columns)
        for ready in norm.step().ready:
            assert (ready.group, ready.seq) not in got
            got[ready.group, ready.seq] = digest(ready)
    return got, norm.state_dict()


def roundtrip(state):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state))


class LiveRun:
    """Interleaves memberships and outcomes, repeats outcomes, restarts from snapshot and log, steps at random."""

    def __init__(self, events, rng, config=SMALL, finish=None):
        self.events, self.rng, self.config, self.finish = events, rng, config, finish
        self.inputs = [(group, seq, columns) for seq, group, columns in events]
        rng.shuffle(self.inputs)
        self.inputs += rng.choices(self.inputs, k=len(events) // 2)
        self.norm = EnvNormalizer("e", config, finish)
        self.got, self.log = {}, [("state", roundtrip(self.norm.state_dict()))]
        self.members = self.outcomes = 0

    def step(self):
        ready, delta = self.norm.step()
        for item in ready:
            assert (item.group, item.seq) not in self.got, "a group was handed out twice"
            self.got[item.group, item.seq] = digest(item)
        if delta is not None:
            self.log.append(("delta", roundtrip(delta)))
            if self.rng.random() < 0.2:
                self.log = [("state", roundtrip(self.norm.state_dict()))]

    def restart(self):
        source = self.norm.oldest_source()
        before = self.norm.state_dict()
        self.norm = EnvNormalizer("e", self.config, self.finish)
        self.norm.load_state_dict(self.log[0][1])
        for _, delta in self.log[1:]:
            self.norm.apply(delta)
        assert self.norm.state_dict() == before
        self.members = next(
            (i for i, (seq, _, _) in enumerate(self.events) if seq >= self.norm.watermark), len(self.events)
        )
        self.outcomes = self.outcomes if source is None else source

    def run(self):
        while self.members < len(self.events) or self.outcomes < len(self.inputs):
            roll = self.rng.random()
            if roll < 0.45 and self.members < len(self.events):
                seq, group, _ = self.events[self.members]
                self.norm.member(seq, group)
                self.members += 1
            elif roll < 0.9 and self.outcomes < len(self.inputs):
                group, seq, columns = self.inputs[self.outcomes]
                self.norm.resolve(group, seq, columns, source=self.outcomes)
                self.outcomes += 1
            elif roll < 0.97:
                self.step()
            elif self.rng.random() < 0.5:
                self.restart()
        self.step()
        return self.got, self.norm.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("config", "finish"), [(SMALL, None), (RANKS, None), (SMALL, finish)])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), groups=st.integers(0, 60))
def test_same_bits_for_any_order_redelivery_batching_and_restart(config, finish, seed, groups):
    rng = random.Random(seed)
    events = history(rng, groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_module, "MAX_CELLS", 8)  # less than the 16 values of a window
        patch.setattr(bonus_fade, "MIN_GROUPS", 8)
        expected, state = in_order(events, config, finish)
        got, live_state = LiveRun(events, rng, config, finish).run()
    assert live_state == state
    assert got == expected


def test_ranks_are_kept_of_keys_without_bounds_alone_and_no_longer_than_sums():
    events = history(random.Random(2), 400, gap=1, dead=0, copies=0)
    norm = EnvNormalizer("e", RANKS)
    last = {}
    for seq, group, columns in events:
        norm.member(seq, group)
        norm.resolve(group, seq, columns)
        for ready in norm.step().ready:
            last = ready.snapshot.normalize("reward", ready.values["reward"])
        assert set(norm._ranks) <= set(norm._ring)
    assert {key for keys in norm._ranks.values() for key in keys} == {"reward"}
    assert norm.snapshot().ranks["reward"].count == norm.snapshot().keys["reward"].count
    assert norm.snapshot().warm("reward")
    assert all(0 <= value <= 1 for value in last if value is not None)


def test_a_mode_of_ranks_warms_up_again_on_the_state_of_another():
    norm = EnvNormalizer("e", SMALL)
    for seq in range(1, 40):
        norm.member(seq, f"g{seq}")
        norm.resolve(f"g{seq}", seq, {"reward": [float(seq), 0.0]})
    norm.step()
    later = EnvNormalizer("e", msgspec.structs.replace(SMALL, mode="rank"))
    later.load_state_dict(roundtrip(norm.state_dict()))
    assert not later.snapshot().warm("reward")


def test_every_group_before_the_last_open_windows_is_handed_out_and_memory_stays_bounded():
    events = history(random.Random(1), 3000, gap=1, dead=0, copies=0)
    norm, seen = EnvNormalizer("e", SMALL), 0
    for seq, group, columns in events:
        norm.member(seq, group)
        norm.resolve(group, seq, columns)
        seen += len(norm.step().ready)
        assert len(norm._open) <= 2
        assert len(norm._ring) <= SMALL.history + 2
        assert len(norm._folded) <= SMALL.window * DUPLICATE_WINDOWS
        assert len(norm._windows.starts()) <= DUPLICATE_WINDOWS
        assert not norm._ahead
        assert not norm._tail
    assert seen == len(events)


def test_a_window_uses_the_snapshot_two_windows_back_and_waits_for_it():
    norm = EnvNormalizer("e", SMALL)
    for seq in range(1, 13):
        norm.member(seq, f"g{seq}")
    for seq in (9, 10, 5, 6, 1, 2, 3):
        norm.resolve(f"g{seq}", seq, {"reward": [float(seq), 0.0]})
    ready = norm.step().ready
    assert [r.seq for r in ready] == [1, 2, 3, 5, 6], "window 2 waits for window 0, in which g4 has no outcome"
    assert {r.snapshot.through for r in ready} == {-1}
    norm.resolve("g4", 4, None)
    ready = norm.step().ready
    assert [(r.seq, r.snapshot.through) for r in ready] == [(9, 0), (10, 0)]
    stats = ready[0].snapshot.keys["reward"]
    assert (stats.count, stats.groups, stats.mean) == (6, 3, 1.0)


def test_a_silent_stretch_costs_nothing():
    norm = EnvNormalizer("e", SMALL)
    for i, seq in enumerate((1, 4 * 10**12, 8 * 10**12, 9 * 10**12)):
        norm.member(seq, f"g{i}")
        norm.resolve(f"g{i}", seq, {"reward": [1.0]})
        norm.step()
    assert norm.snapshot().through == 0
    assert norm.snapshot().keys["reward"].groups == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300, 10**400, "1", True + 1e13])
def test_a_bad_value_is_refused_with_its_place_and_leaves_the_state_untouched(bad):
    norm = EnvNormalizer("e", msgspec.structs.replace(SMALL, window=1))
    norm.member(1, "a")
    before = norm.state_dict(), norm.metrics()
    with pytest.raises(DataError, match=r"group a: reward\[1\]"):
        norm.resolve("a", 1, {"format": [0.0, 1.0], "reward": [0.5, bad]})
    assert (norm.state_dict(), norm.metrics()) == before
    norm.resolve("a", 1, None)
    step = norm.step()
    assert step.ready == []
    assert step.delta["closed"][0]["keys"] == {}


@pytest.mark.parametrize("columns", [{}, {"reward": []}, {"reward": [1.0], "format": [1.0, 2.0]}])
def test_columns_without_samples_or_of_different_lengths_are_refused(columns):
    norm = EnvNormalizer("e", SMALL)
    with pytest.raises(DataError, match="columns have lengths"):
        norm.resolve("a", 1, columns)


def test_memberships_out_of_order_are_refused_and_repeats_ignored():
    norm = EnvNormalizer("e", SMALL)
    norm.member(2, "a")
    norm.member(2, "a")
    assert norm.duplicates == 1
    with pytest.raises(DataError, match="feed in order"):
        norm.member(1, "b")


@pytest.mark.parametrize("membership_first", [True, False])
@pytest.mark.parametrize("named", [1, 9])
def test_a_group_stored_twice_is_one_member_whichever_copy_was_scored(membership_first, named):
    norm = EnvNormalizer("e", msgspec.structs.replace(SMALL, window=1))
    feed = [lambda: norm.member(1, "a"), lambda: norm.member(9, "a"), lambda: norm.member(17, "b")]
    score = [lambda: norm.resolve("a", named, {"reward": [1.0]})]
    for act in feed + score if membership_first else score + feed:
        act()
    step = norm.step()
    assert [(r.group, r.seq) for r in step.ready] == [("a", 1)]
    assert step.delta["closed"][0]["members"] == [[1, "a"]]


def test_what_was_folded_is_not_waited_for_after_a_restart():
    norm = EnvNormalizer("e", SMALL)
    for seq in range(1, 6):
        norm.member(seq, f"g{seq}")
        norm.resolve(f"g{seq}", seq, {"reward": [1.0]}, source=seq)
    norm.step()
    again = EnvNormalizer("e", SMALL)
    again.load_state_dict(roundtrip(norm.state_dict()))
    again.resolve("g2", 2, {"reward": [1.0]}, source=2)
    assert (again.duplicates, again.oldest_source()) == (1, None)


def test_a_repeat_after_the_window_was_folded_changes_nothing():
    norm = EnvNormalizer("e", SMALL)
    for seq in (1, 5, 9, 10):
        norm.member(seq, f"g{seq}")
        norm.resolve(f"g{seq}", seq, {"reward": [1.0]})
    norm.step()
    assert norm.watermark == 11
    before = norm.state_dict()
    norm.resolve("g1", 1, {"reward": [99.0]})
    assert norm.step() == ([], None)
    assert norm.state_dict() == before


def test_an_outcome_of_a_stranger_is_dropped_and_counted():
    norm = EnvNormalizer("e", SMALL)
    norm.member(3, "a")
    norm.resolve("stranger", 2, {"reward": [1.0]})
    norm.resolve("ahead", 7, {"reward": [1.0]})
    norm.member(8, "b")
    norm.step()
    assert norm.unknown == 2
    assert norm.oldest_source() is None


@pytest.mark.parametrize("read_first", [True, False])
def test_the_outcome_that_was_stored_first_counts_whatever_was_read_first(read_first):
    """Raters that are called twice may answer differently."""
    norm = EnvNormalizer("e", SMALL)
    norm.member(1, "a")
    if read_first:
        norm.member(3, "a")
    norm.resolve("a", 3, {"reward": [7.0]}, source=10)
    norm.resolve("a", 1, {"reward": [0.0]}, source=11)
    if not read_first:
        assert norm.step().ready == []
        norm.member(3, "a")
    assert [ready.values["reward"] for ready in norm.step().ready] == [(7.0,)]


def fed(sequences, config=SMALL):
    """Return the rewards of groups stored at these sequences, by group, and the state."""
    norm, got = EnvNormalizer("e", config), {}
    for n, seq in enumerate(sequences):
        norm.member(seq, f"g{n}")
        norm.resolve(f"g{n}", seq, {"reward": [float(n), 1.0]})
        got |= {ready.group: digest(ready)[1:] for ready in norm.step().ready}
    return got


def test_what_others_store_in_between_changes_nothing():
    alone, beside = fed(range(1, 61)), fed(range(1, 60 * 50, 50))
    assert alone == beside
    assert len({snapshot for snapshot, _ in alone.values()}) == 60 // SMALL.window - 1


def test_a_window_closes_with_its_last_group_and_is_not_waited_for_by_the_next():
    norm = EnvNormalizer("e", SMALL)
    for n in range(12):
        norm.member(10 * n + 7, f"g{n}")
    for n in (8, 4, 0, 1, 2):
        norm.resolve(f"g{n}", 10 * n + 7, {"reward": [float(n), 0.0]}, source=n)
    assert [ready.group for ready in norm.step().ready] == ["g0", "g1", "g2", "g4"]
    assert norm.watermark == 1
    norm.resolve("g3", 37, None)
    step = norm.step()
    assert [(ready.group, ready.snapshot.through) for ready in step.ready] == [("g8", 0)]
    assert (norm.watermark, step.delta["watermark"]) == (38, 38)


def test_state_of_another_env_width_or_version_is_refused():
    state = EnvNormalizer("e", SMALL).state_dict()
    for change, text in (
        ({"env": "f"}, "environment 'f', this is 'e'"),
        ({"window": 5}, f"normalization.window is {SMALL.window} now, but the run's statistics were made with 5"),
        ({"version": 2}, "another build of lachesis wrote"),
    ):
        with pytest.raises(ConfigError) as refused:
            EnvNormalizer("e", SMALL).load_state_dict(state | change)
        assert text in str(refused.value)
    with pytest.raises(SettingsChangedError) as changed:
        EnvNormalizer("e", SMALL).load_state_dict(state | {"window": 5})
    for way_on in ("Set it back to 5", "lachesis replay", "lachesis promote", "start a new run"):
        assert way_on in str(changed.value)
    fed = EnvNormalizer("e", SMALL)
    fed.member(1, "a")
    with pytest.raises(RuntimeError, match="before inputs"):
        fed.load_state_dict(state)


def test_a_delta_of_another_width_is_refused_before_there_is_any_snapshot():
    norm = EnvNormalizer("e", SMALL)
    for seq, group, columns in history(random.Random(3), 3 * SMALL.window, dead=0):
        norm.member(seq, group)
        norm.resolve(group, seq, columns)
    delta = roundtrip(norm.step().delta)
    wider = EnvNormalizer("e", msgspec.structs.replace(SMALL, window=SMALL.window + 1))
    with pytest.raises(SettingsChangedError, match=r"normalization\.window is \d now"):
        wider.apply(delta)
    again = EnvNormalizer("e", SMALL)
    again.apply(delta)
    assert again.state_dict() == norm.state_dict()


def test_a_snapshot_survives_encoding_and_normalizes_alike():
    norm = EnvNormalizer("e", SMALL)
    for seq, group, columns in history(random.Random(3), 40, dead=0):
        norm.member(seq, group)
        norm.resolve(group, seq, columns)
        norm.step()
    snapshot = norm.snapshot()
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=NormalizationSnapshot)
    column = [0.1, None, 7.0]
    assert again == snapshot
    assert again.normalize("reward", column) == snapshot.normalize("reward", column)
    assert norm.metrics()[f"reward_norm/{norm.env}/reward/count"] == snapshot.keys["reward"].count


@pytest.mark.parametrize(
    "changes",
    [
        {"base": -1}, {"base": 2**60}, {"base": "3"}, {"emitted": [0]}, {"recent": [["g", 1]]}, {"ring": {"x": {}}},
        {"ring": {"99": {}}}, {"ring": {"0": {"score": ["1"] * 5}}}, {"ring": {"0": {"score": ["9" * 5000] * 6}}},
        {"ring": {"0": {"score": ["2", "1", "4", "1", "0", "4"]}}},  # two values whose variance is negative
        {"ring": {"0": {"score": ["-1", "0", "0", "0", "0", "0"]}}},
        {"starts": [5, 5], "watermark": 9}, {"starts": [1, 5, 9, 13], "watermark": 17}, {"starts": [9], "watermark": 9},
        {"recent": [[9, "g"]], "watermark": 9}, {"tail": [[9, "g"]], "watermark": 9},
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_is_refused_before_it_is_taken_over(changes):
    state = EnvNormalizer("env", NormalizationConfig()).state_dict()
    normalizer = EnvNormalizer("env", NormalizationConfig())
    normalizer.load_state_dict(state)
    with pytest.raises(SchemaError):
        normalizer.load_state_dict({**state, "base": 3, **changes})
    assert normalizer.state_dict() == state


def test_a_delta_with_a_window_of_nothing_is_refused_before_it_is_taken_over():
    normalizer = EnvNormalizer("e", SMALL)
    before = normalizer.state_dict()
    closed = [{"window": 0, "keys": {}, "members": []}]
    with pytest.raises(SchemaError, match="members"):
        normalizer.apply(
            {"version": 1, "width": SMALL.window, "base": 1, "closed": closed, "emitted": [], "watermark": 2}
        )
    assert normalizer.state_dict() == before
