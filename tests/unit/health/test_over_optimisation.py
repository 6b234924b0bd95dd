"""over_optimisation leaves runs alone in which most raters rise, and those in which the raters come together."""

import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.monitor import EnvMonitor

WINDOWS = 24


def rated(groups, **levels):
    """Ratings of one group by raters whose levels are given; they differ by .05 at random."""
    skill = [groups.rng.gauss(0, 0.15) for _ in range(8)]
    return {name: [level + value + groups.rng.gauss(0, 0.05) for value in skill] for name, level in levels.items()}


def judge(groups, make):
    monitor = EnvMonitor(HealthConfig())
    groups.windows(monitor, 4, lambda _: groups.score(ratings=make(0.0)))
    found = groups.windows(monitor, WINDOWS, lambda i: groups.score(ratings=make(i / (64 * WINDOWS))))
    results = [one["over_optimisation"] for one in found]
    return monitor, {one.severity for one in results}, {one.reason for one in results}


@pytest.mark.slow
def test_a_rater_of_brevity_that_falls_while_most_rise_only_informs(groups):
    """Thinking longer helps: what the answers are worth rises, and only the rater of brevity falls."""
    monitor, severities, _ = judge(
        groups, lambda far: rated(groups, exact=0.3 + far, similar=0.3 + far, brief=0.7 - 0.3 * far)
    )
    assert severities <= {"idle", "ok", "inform"}
    assert "inform" in severities
    assert monitor.standing.quarantined_from is None


@pytest.mark.slow
def test_one_rater_that_falls_while_one_rises_and_one_stays_only_informs(groups):
    """The same with three raters, of which one has nothing to do with thinking longer."""
    monitor, severities, _ = judge(groups, lambda far: rated(groups, exact=0.3 + far, brief=0.7 - 0.3 * far, style=0.5))
    assert "inform" in severities
    assert not severities & {"warn", "quarantine"}
    assert monitor.standing.quarantined_from is None


@pytest.mark.slow
def test_most_raters_falling_while_the_score_rises_still_quarantines(groups):
    monitor, severities, reasons = judge(
        groups, lambda far: rated(groups, exact=0.5 - 0.2 * far, similar=0.5 - 0.2 * far, style=0.5 + far)
    )
    assert "quarantine" in severities
    assert monitor.standing.cause == "over_optimisation"
    assert any("; rising raters: style; falling raters: exact, similar" in (reason or "") for reason in reasons)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_raters_that_come_together_as_answers_come_to_be_alike_are_healthy(groups, seed):
    """The variance between raters falls, but that of what they rate falls faster: alpha falls, and means nothing."""
    groups.rng.seed(seed)

    def make(far):
        skill = [groups.rng.gauss(0.4 + 0.3 * far, 0.2 * (1 - 0.9 * far)) for _ in range(8)]
        noise = 0.06 * (1 - 0.5 * far)
        return {name: [value + groups.rng.gauss(0, noise) for value in skill] for name in ("exact", "similar", "judge")}

    monitor, severities, _ = judge(groups, make)
    assert severities <= {"idle", "ok"}
    assert monitor.standing.quarantined_from is None
