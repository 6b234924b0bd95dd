"""An unavailable rater is reported as one, by name, error and time; the environment goes on."""

from statistics import fmean

import msgspec
import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.schemas.annotations import Stamp

REFUSED = "ConnectError: connection refused (gave up after 4 attempts)"
SINCE_NS = 1_700_000_000_000_000_000


def away(groups, text=REFUSED, status="error", **changes):
    """A group that one of the raters rated nothing of, so that it could not be scored."""
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


STRICT = 0.3
"""By how much the judge rates lower than the others."""


def timed_out(groups, lost, worth=0.0):
    """A group of which the strict judge rates no sample in `lost`, which are worth `worth` more; scores are means."""
    skill = [groups.rng.gauss(0.6, 0.15) + worth * (i in lost) for i in range(8)]
    noisy = {name: [value + groups.rng.gauss(0, 0.05) for value in skill] for name in ("exact", "style", "judge")}
    judged = [None if i in lost else value - STRICT for i, value in enumerate(noisy["judge"])]
    columns = {**noisy, "judge": judged}
    scores = [fmean(c[i] for c in columns.values() if c[i] is not None) for i in range(8)]
    statuses = {"judge": ["timeout" if i in lost else "ok" for i in range(8)]}
    return groups.score(ratings=columns, scores=scores, statuses=statuses)


def bursts(groups):
    """Return a source of which samples a rater that is overloaded now and then fails to rate: 13 % of all."""
    state = [0]

    def lost(_):
        state[0] = max(0, state[0] - 1) or (groups.rng.randrange(40, 120) if groups.rng.random() < 0.006 else 0)
        return {i for i in range(8) if groups.rng.random() < (0.4 if state[0] else 0.05)}

    return lost


@pytest.mark.slow
def test_a_strict_rater_that_is_overloaded_quarantines_nothing(groups):
    """The samples that it does not rate are paid more, by chance: nothing says that answers make it fail."""
    monitor, lost = EnvMonitor(HealthConfig()), bursts(groups)
    found = groups.windows(monitor, 40, lambda i: timed_out(groups, lost(i)))
    assert sum(results["missing"].severity != "ok" for results in found) >= 8
    assert monitor.standing.quarantined_from is None


@pytest.mark.slow
def test_answers_that_make_a_rater_fail_quarantine_while_they_are_few(groups):
    """One rating in eight is missing: hardly more than what only informs, but it depends on the answer, and is paid."""
    monitor = EnvMonitor(HealthConfig())

    def one(_):
        return timed_out(groups, {i for i in range(8) if groups.rng.random() < 0.125}, -0.05)

    found = groups.windows(monitor, 12, one)
    assert monitor.standing.cause == "missing"
    assert "answers may make it fail" in found[-1]["missing"].reason


@pytest.mark.slow
@pytest.mark.parametrize("worth", [-0.15, 0.1])
def test_a_strict_rater_that_answers_make_fail_quarantines(groups, worth):
    """What fails depends on the answer: the other raters find it worse, or better, and it is paid all the same."""
    monitor = EnvMonitor(HealthConfig())

    def one(_):
        return timed_out(groups, {i for i in range(8) if groups.rng.random() < 0.3}, worth if worth > 0 else worth / 3)

    found = groups.windows(monitor, 12, one)
    assert monitor.standing.cause == "missing"
    assert "answers may make it fail" in found[-1]["missing"].reason


@pytest.mark.slow
def test_a_strict_rater_that_fails_more_and_more_quarantines(groups):
    """The others see no difference, and yet more and more answers make it fail, since that is paid."""
    monitor = EnvMonitor(HealthConfig())
    groups.windows(
        monitor, 40, lambda i: timed_out(groups, {k for k in range(8) if groups.rng.random() < 0.5 * i / (64 * 40)})
    )
    assert monitor.standing.cause == "missing"


@pytest.mark.slow
def test_many_missing_ratings_inform_and_warn_if_they_last(groups):
    monitor = EnvMonitor(HealthConfig())

    def one(i):
        lost = {0, 1, 2} if i >= 256 else set()
        return groups.score(statuses={"judge": ["timeout" if k in lost else "ok" for k in range(8)]})

    found = [results["missing"].severity for results in groups.windows(monitor, 14, one)]
    assert found[:5] == ["ok"] * 4 + ["inform"]
    assert found[-1] == "warn"
    assert monitor.standing.quarantined_from is None


@pytest.mark.parametrize("reason", ["another each time", "now and then"])
def test_scores_of_which_most_are_missing_quarantine(groups, reason):
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
    assert found[2]["missing"].severity == "warn"
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
