"""Bonuses that no sample earns are reported, with the cause and the way out."""

import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.check import HealthWindow
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.pipeline.health.logic.unpaid_bonuses import UnpaidBonuses
from lachesis.schemas.annotations import GroupShaping


def shaping(length=0.0, **markers):
    return GroupShaping(
        bonus=[0.0] * 8,
        succeeded=[False] * 8,
        ceiling=0.9,
        markers={name: [had] * 7 + [False] for name, had in markers.items()},
        length=[length] * 8,
    )


def windows(groups, count, made, **changes):
    """Yield what the check says of so many windows of 32 groups, through its saved state."""
    check = UnpaidBonuses()
    for window in range(count):
        scores = [groups.score(shaping=made(32 * window + i), **changes) for i in range(32)]
        state = check.state_dict()
        check = UnpaidBonuses()
        check.load_state_dict(state)
        yield check.evaluate(HealthWindow(scores=scores))


def test_a_marker_that_no_sample_had_in_128_groups_is_named(groups):
    found = list(windows(groups, 5, lambda i: shaping(**{"####": i % 60 == 0, "<think>": False})))
    assert [one.severity for one in found] == ["ok", "ok", "ok", "warn", "warn"]
    assert [one.value for one in found] == [32, 64, 96, 128, 160]
    assert "no sample of the last 128 groups has <think> of" in found[3].reason
    assert "ask for it in the prompt" in found[3].reason
    assert "####" not in found[3].reason
    assert not found[3].grows


def test_one_sample_that_has_it_begins_the_count_again(groups):
    found = list(windows(groups, 6, lambda i: shaping(**{"<think>": i == 100})))
    assert [one.severity for one in found] == ["ok"] * 6
    assert found[-1].value == 6 * 32 - 101


def test_answers_that_are_cut_off_are_the_cause(groups):
    *_, last = windows(groups, 4, lambda i: shaping(**{"<think>": False}), signals={"truncated": 7})
    assert "88% of the samples are cut off before they get there: raise max_new_tokens" in last.reason


def test_a_bonus_for_length_alone_that_nobody_earns_is_named(groups):
    *_, last = windows(groups, 4, lambda i: shaping())
    assert (last.severity, "lower reward_config.length_from" in last.reason) == ("warn", True)
    *_, last = windows(groups, 4, lambda i: shaping(0.01))
    assert last.severity == "ok"


@pytest.mark.parametrize(("in_force", "severity"), [(0.0, "ok"), (0.5, "warn"), (None, "warn")])
def test_nothing_is_told_once_bonuses_have_faded(groups, in_force, severity):
    scores = [groups.score(shaping=shaping(**{"<think>": False})) for _ in range(128)]
    rewards = [groups.reward(score, shaping_scale=in_force) for score in scores]
    assert UnpaidBonuses().evaluate(HealthWindow(scores=scores, rewards=rewards)).severity == severity


def test_the_monitor_tells_it(groups):
    monitor = EnvMonitor(HealthConfig(window=64))
    found = groups.windows(monitor, 2, lambda _: groups.score(shaping=shaping(**{"<think>": False})))
    assert [one["unpaid_bonuses"].severity for one in found] == ["ok", "warn"]
