"""The monitor: escalation, what may be done, resumption, and that a restart comes to the same."""

import random

import msgspec
import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.monitor import CHECKS, EnvMonitor
from lachesis.schemas.alerts import RolloutRange
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.ledger import GroupRef

ALL_HALT = HealthConfig(halts=CHECKS)


def alike(groups):
    def group(_):
        text = groups.rng.getrandbits(30)
        return groups.score(signals={"texts": [text] * 5 + [text + 1, text + 2, text + 3]})  # 4 of 7 repeat: warns

    return group


def test_a_warning_that_lasts_becomes_a_quarantine_and_then_a_halt(groups, monitor):
    groups.windows(monitor, 2)
    found = [results["mode_collapse"] for results in groups.windows(monitor, 6, alike(groups))]
    assert [result.severity for result in found] == ["warn", "warn", *["quarantine"] * 3, "halt"]
    assert [result.windows for result in found] == [1, 2, 3, 4, 5, 6]
    assert monitor.standing.quarantined_from == 4 * 64 + 1  # the first group of the window that brought it about
    assert (monitor.standing.halted, monitor.standing.cause) == (True, "mode_collapse")


@pytest.mark.slow
def test_answers_that_repeat_themselves_never_do_more_than_warn(groups, monitor):
    """The right answers of grid puzzles have a distinct-3 of a twentieth."""
    groups.windows(monitor, 2)
    found = [
        results["mode_collapse"]
        for results in groups.windows(monitor, 12, lambda _: groups.score(signals={"distinct": 0.05}))
    ]
    assert {result.severity for result in found} == {"warn"}
    assert "3-grams" in found[0].reason
    assert monitor.standing.quarantined_from is None


def test_a_healthy_window_between_ends_the_count(groups, monitor):
    for _ in range(3):
        groups.windows(monitor, 2, alike(groups))
        groups.windows(monitor, 1)
    assert monitor.standing.quarantined_from is None


def test_drift_never_grows(groups, monitor):
    """A policy that learns fast moves its rewards window after window."""
    found = groups.windows(monitor, 12, lambda i: groups.score(level=0.1 + i / 64 * 0.07))
    assert sum(results["reward_drift"].severity == "inform" for results in found) >= 3
    assert {results["reward_drift"].windows for results in found} == {0}
    assert monitor.standing.quarantined_from is None


def test_what_is_stuck_or_done_warns_and_only_what_is_broken_halts(groups):
    """All wrong, all right, all cut off, all sure: a person should look, and nothing is destroyed."""
    monitor = EnvMonitor(HealthConfig())
    groups.windows(monitor, 3)
    found = groups.windows(
        monitor, 12, lambda _: groups.score(scores=[0.0] * 8, signals={"truncated": 8, "logprobs": [-1e-4] * 8})
    )
    for check in ("saturation", "zero_variance", "truncated", "entropy"):
        assert found[-1][check].severity == "warn", check
    assert (monitor.standing.quarantined_from, monitor.standing.halted) == (None, False)
    groups.windows(monitor, 1, lambda _: groups.score(statuses={"judge": ["nonfinite"] + ["ok"] * 7}))
    assert monitor.standing.halted
    with pytest.raises(ConfigError, match=r"health\.halts: there is no check 'zero'"):
        EnvMonitor(HealthConfig(halts=("zero",)))


@pytest.mark.parametrize(("act", "quarantined", "halted"), [("warn", False, False), ("quarantine", True, False)])
def test_no_check_does_more_than_it_may(groups, act, quarantined, halted):
    monitor = EnvMonitor(HealthConfig(act=act, halts=CHECKS))
    (results,) = groups.windows(monitor, 1, lambda _: groups.score(scores=[0.5] * 8))
    assert results["zero_variance"].severity == act
    assert (monitor.standing.quarantined_from is not None, monitor.standing.halted) == (quarantined, halted)


def test_a_check_can_be_turned_off_and_an_unknown_one_is_named(groups):
    monitor = EnvMonitor(HealthConfig(off=["zero_variance", "staleness"]))
    (results,) = groups.windows(monitor, 1, lambda _: groups.score(scores=[0.5] * 8))
    assert "zero_variance" not in results
    with pytest.raises(ConfigError, match="there is no check 'zero'"):
        EnvMonitor(HealthConfig(off=["zero"]))


def test_a_score_that_is_stored_twice_counts_once(groups, monitor):
    first = [groups.score() for _ in range(64)]
    for score in first[:63]:
        monitor.score(score)
        monitor.score(score)
    assert not monitor.window_full
    monitor.score(first[63])
    assert monitor.window_full
    monitor.evaluate()
    for score in first:  # of the window before
        monitor.score(score)
    assert not monitor.window_full


@pytest.mark.parametrize("restart", [False, True])
def test_resumption_begins_anew_after_what_was_stored(groups, monitor, restart):
    groups.windows(monitor, 1, lambda _: groups.score(scores=[0.5] * 8))
    assert monitor.standing.halted
    before = [groups.score() for _ in range(64)]
    monitor.resume(7, groups.seq)
    assert (monitor.standing.halted, monitor.standing.quarantined_from) == (False, None)
    assert (monitor.resumed, monitor.groups) == (7, 0)
    if restart:
        state = monitor.state_dict()
        monitor = EnvMonitor(ALL_HALT)
        monitor.load_state_dict(state)
        assert monitor.resumed == 7
    for score in before:  # stored before, scored after: no part of what is checked now
        monitor.score(score)
    assert not monitor.window_full
    assert len(groups.windows(monitor, 1)) == 1
    assert monitor.groups == 64
    assert not monitor.standing.halted


@pytest.mark.slow
def test_what_was_quarantined_is_remembered_over_resumptions(groups, monitor):
    for n in range(1, 20):
        first = groups.seq + 1
        groups.windows(monitor, 1, lambda _: groups.score(scores=[0.5] * 8))
        assert monitor.standing.quarantined_from == first
        groups.seq += 5  # stored, not scored yet
        for _ in range(2):  # the second one lifts nothing
            monitor.resume(n, groups.seq)
            assert monitor.standing.diverted[-1] == RolloutRange(first=first, last=groups.seq, cause="zero_variance")
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(monitor.state_dict()))
        monitor = EnvMonitor(ALL_HALT)
        monitor.load_state_dict(state)
        assert len(monitor.standing.diverted) == min(n, 16)
    assert monitor.standing.untrainable_reason(first) == monitor.standing.untrainable_reason(groups.seq) is not None
    assert monitor.standing.untrainable_reason(groups.seq + 1) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_restart_between_windows_changes_nothing(groups, seed):
    """Results with a save and load after random windows equal those without, bit for bit."""
    rng = random.Random(seed)
    groups.rng.seed(seed)
    scores = [groups.score(level=0.3 + i / 5000, signals={"truncated": i // 400}) for i in range(1300)]

    def run(restart):
        monitor, found = EnvMonitor(ALL_HALT), []
        for score in scores:
            results = groups.feed(monitor, score)
            if results is not None:
                found.append((list(results.values()), monitor.standing))
                if restart and rng.random() < 0.6:
                    state = msgspec.msgpack.decode(msgspec.msgpack.encode(monitor.state_dict()))
                    monitor = EnvMonitor(ALL_HALT)
                    monitor.load_state_dict(state)
        return found

    calm = run(restart=False)
    assert len(calm) == 20
    assert run(restart=True) == calm


@pytest.mark.slow
def test_the_state_stays_small(groups, monitor):
    groups.windows(monitor, 100)  # with pairs of raters over 96 of them
    assert len(msgspec.msgpack.encode(monitor.state_dict())) < 50_000
    assert len(CHECKS) == len(set(CHECKS)) == 31


def test_a_promoted_revision_is_judged_by_itself(groups, monitor):
    """Its scores lie elsewhere: no drift, for what was before says nothing of them; and old ones come late."""
    groups.windows(monitor, 6)
    late = groups.score(level=0.5)
    monitor.promote(late.seq + 1)
    monitor.score(late)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(monitor.state_dict()))
    again = EnvMonitor(HealthConfig())
    again.load_state_dict(state)
    assert again.promoted == late.seq + 1
    for results in groups.windows(monitor, 6, lambda _: groups.score(level=0.1)):
        assert all(result.severity in ("ok", "idle") for result in results.values()), results
    assert monitor.standing.quarantined_from is None


@pytest.mark.parametrize("promoted_after", range(5))
def test_verdicts_on_batches_do_not_depend_on_when_a_promotion_is_heard_of(groups, promoted_after):
    """Batches come from LEDGER, promotions from EVENTS: which is read first is chance."""
    verdicts, monitors = [], (EnvMonitor(HealthConfig()), EnvMonitor(HealthConfig()))
    for monitor in monitors:
        found = []
        for number in range(32):
            if monitor is monitors[1] and number == 6 * promoted_after:
                monitor.promote(20)
            ref = GroupRef(
                group=f"{number:032x}", seq=number + 1, env="e", sequences=1, tokens=1,
                policy_step=max(0, number - 9), advantages=[1.0], teacher=None,
            )  # fmt: skip
            monitor.batch(number, [ref])
            if monitor.batches_full:
                found.append((number, [(one.check, one.value, one.windows) for one in monitor.judge_batches()]))
        verdicts.append(found)
    assert verdicts[0] == verdicts[1]
    assert len(verdicts[0]) == 4


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("seen",), ["x"]),
        (("groups",), "many"),
        (("windows",), {"groups": None}),
        (("resumed",), None),
        (("after",), 1.5),
        (("lag",), []),
        (("evaluated_ns",), "now"),
        (("standing",), {"halted": "yes"}),
        (("checks", "mode_collapse", "between"), "x"),
        (("checks", "entropy", "average"), "x"),
        (("checks", "rater_saturation", "start"), [{"a": "x"}]),
        (("checks", "unconfirmed_gain", "points"), "x"),
        (("checks", "unconfirmed_gain", "learning"), {"a b": ["x"]}),
        (("checks", "missing", "recent"), ["x"]),
        (("step_size", "start"), ["x"]),
    ],
)
def test_a_state_that_no_monitor_wrote_is_refused_where_it_is_read(groups, monitor, place, value):
    """And not some windows later, by an error that names nothing."""
    groups.windows(monitor, 2)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(monitor.state_dict()))
    EnvMonitor(ALL_HALT).load_state_dict(state)
    *outer, last = place
    inside = state
    for name in outer:
        inside = inside[name]
    assert last in inside
    inside[last] = value
    with pytest.raises(SchemaError, match="health"):
        EnvMonitor(ALL_HALT).load_state_dict(state)
