"""An unavailable rater is told as one, by name, error and time; the environment goes on."""

import msgspec
import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.schemas.annotations import Stamp

REFUSED = "ConnectError: connection refused (gave up after 4 attempts)"
SINCE_NS = 1_700_000_000_000_000_000


def away(groups, text=REFUSED, status="error", **changes):
    """A group that one of the raters rated nothing of, so that nobody could score it."""
    fields = {
        "scores": [None] * 8,
        "statuses": {"judge": [status] * 8},
        "failures": {"judge": text},
        "stamps": [Stamp("scorer", 1, SINCE_NS + groups.seq * 10**9, 2)],
    }
    return groups.score(**fields | changes)


def unscorable(groups):
    return lambda score: groups.reward(score) if None in score.scores else None


def test_an_outage_is_told_with_rater_error_and_time_and_quarantines_nothing(groups):
    monitor = EnvMonitor(HealthConfig())
    found = groups.windows(monitor, 6, lambda _: away(groups), unscorable(groups))
    for results in found:
        assert results["missing"].severity == "warn"
    reason = found[5]["missing"].reason
    assert reason.startswith(
        "rater judge is unavailable or broken; the environment is not the cause: ConnectError: connection"
    )
    assert "384 groups in a row since 2023-11-14 22:13:20 UTC, from " + f"{1:032x}" in reason
    assert found[0]["missing"].examples[0] == f"{1:032x}"
    assert found[5]["missing"].windows == 6
    assert (monitor.standing.quarantined_from, monitor.standing.halted) == (None, False)


@pytest.mark.costly
def test_chance_quarantines_nothing_where_a_groups_ratings_are_missing_together(groups):
    """One group in twelve, of windows of 16: more than 10 % in every seventh window, and three of those in a row."""
    monitor = EnvMonitor(HealthConfig(window=16, off=["zero_variance"]))

    def one(_):
        lost = groups.rng.random() < 1 / 12
        return groups.score(statuses={"judge": ["timeout"] * 8} if lost else {})

    found = groups.windows(monitor, 300, one)
    assert any(results["missing"].windows >= 3 for results in found)
    assert monitor.standing.quarantined_from is None


@pytest.mark.costly
@pytest.mark.parametrize(
    ("windows", "quarantined"), [(range(8, 12), None), (range(8, 13), None), (range(8, 15), 14), (range(3), 2)]
)
def test_a_burst_of_missing_ratings_quarantines_nothing_unless_it_lasts(groups, windows, quarantined):
    monitor = EnvMonitor(HealthConfig())

    def one(i):
        lost = 3 if i // 64 in windows else 0
        return groups.score(statuses={"judge": ["timeout"] * lost + ["ok"] * (8 - lost)})

    found = groups.windows(monitor, 16, one)
    first = next((k for k, results in enumerate(found) if results["missing"].severity == "quarantine"), None)
    assert first == quarantined
    assert (monitor.standing.quarantined_from is None) == (quarantined is None)


@pytest.mark.parametrize("reason", ["another each time", "now and then"])
def test_what_is_no_outage_quarantines_as_before(groups, reason):
    def one(i):
        if reason == "now and then" and i % 7 == 0:
            return groups.score(statuses={"judge": ["ok"] * 8})
        return away(groups, text=f"Error{i}: no" if reason == "another each time" else REFUSED)

    monitor = EnvMonitor(HealthConfig())
    found = groups.windows(monitor, 4, one, unscorable(groups))
    assert [results["missing"].severity for results in found] == ["warn", "warn", "quarantine", "quarantine"]


def test_an_outage_does_not_hide_another_rater_that_fails_now_and_then(groups):
    def one(i):
        return away(groups, statuses={"judge": ["error"] * 8, "style": ["timeout"] * 2 + ["ok"] * 6})

    monitor = EnvMonitor(HealthConfig())
    found = groups.windows(monitor, 3, one, unscorable(groups))
    assert found[2]["missing"].severity == "quarantine"
    assert "ratings of style are missing" in found[2]["missing"].reason


def test_an_outage_over_a_restart_is_the_same_one(groups):
    monitor = EnvMonitor(HealthConfig())
    groups.windows(monitor, 2, lambda _: away(groups), unscorable(groups))
    again = EnvMonitor(HealthConfig())
    again.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(monitor.state_dict())))
    (results,) = groups.windows(again, 1, lambda _: away(groups), unscorable(groups))
    assert f"192 groups in a row since 2023-11-14 22:13:20 UTC, from {1:032x}" in results["missing"].reason


def test_an_end_of_the_outage_ends_its_run(groups):
    monitor = EnvMonitor(HealthConfig())
    groups.windows(monitor, 1, lambda _: away(groups), unscorable(groups))
    (results,) = groups.windows(monitor, 1)
    assert results["missing"].severity == "ok"
    assert not monitor.state_dict()["checks"]["missing"]["runs"]


def test_the_state_of_a_build_before_is_taken_up(groups):
    monitor = EnvMonitor(HealthConfig())
    state = monitor.state_dict()
    state["checks"]["missing"] = {}
    monitor.load_state_dict(state)
    assert groups.windows(monitor, 1)[0]["missing"].severity == "ok"
