"""The schedule: repeatable, exact in its kills, fair to every kind."""

from collections import Counter

from chaos.schedule import CONNECTION, SERVER, SUPERVISOR, schedule

TARGETS = [SERVER, SUPERVISOR, "batcher", "scorer-1", "scorer-2", "trainer", "inference-policy"]


def test_a_seed_decides_everything():
    first = schedule(7, TARGETS, kills=50, pause_s=1.0, connections=True)
    assert first == schedule(7, list(reversed(TARGETS)), kills=50, pause_s=1.0, connections=True)
    assert first != schedule(8, TARGETS, kills=50, pause_s=1.0, connections=True)


def test_there_are_as_many_kills_as_asked_for_and_the_last_strike_is_one():
    strikes = schedule(1, TARGETS, kills=333, pause_s=1.0, connections=True)
    assert sum(strike.action == "kill" for strike in strikes) == 333
    assert strikes[-1].action == "kill"


def test_every_target_has_its_share():
    strikes = schedule(1, TARGETS, kills=1000, pause_s=1.0, connections=False)
    struck = Counter(strike.target for strike in strikes)
    assert struck.keys() == set(TARGETS)
    assert (
        max(struck[name] for name in ("batcher", "scorer-1", SERVER))
        - min(struck[name] for name in ("batcher", "scorer-1", SERVER))
        <= 3
    )
    assert 2.5 < struck["batcher"] / struck["trainer"] < 3.5
    assert 2.5 < struck["batcher"] / struck[SUPERVISOR] < 3.5


def test_connections_are_struck_where_they_can_be():
    actions = {strike.action for strike in schedule(1, TARGETS, kills=300, pause_s=1.0, connections=True)}
    assert actions == {"kill", "freeze", "restart", "duplicate", "cut", "silence"}
    without = schedule(1, TARGETS, kills=300, pause_s=1.0, connections=False)
    assert all(strike.target != CONNECTION for strike in without)
