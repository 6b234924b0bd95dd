"""Heartbeats by service and process: what speaks, what has ended, and how figures grew within the window."""

from lachesis.pipeline.telemetry.heartbeat_log import SILENCE_S, HeartbeatLog
from lachesis.schemas.control import Heartbeat, StageVitals


def beat(service: str, instance: str = "1-a", *, sent_s: float = 0.0, handled: int = 0) -> Heartbeat:
    return Heartbeat(
        run="r",
        service=service,
        instance=instance,
        pid=1,
        time_ns=int(sent_s * 1e9),
        stage=StageVitals(handled=handled),
    )


def test_the_newest_heartbeat_of_each_process_is_kept() -> None:
    log = HeartbeatLog()
    log.add(beat("scorer", handled=1), 0.0)
    log.add(beat("scorer", "2-b", handled=5), 0.5)
    log.add(beat("scorer", handled=2), 1.0)
    log.add(beat("batcher", handled=9), 1.0)
    assert log.services() == {"scorer", "batcher"}
    assert [one.stage.handled for one in log.newest()] == [2, 5, 9]
    assert [one.newest.stage.handled for one in log.processes("scorer")] == [2, 5]
    assert log.processes("trainer") == []


def test_a_process_that_is_silent_no_longer_speaks_and_is_still_known() -> None:
    log = HeartbeatLog()
    log.add(beat("scorer"), 10.0)
    assert log.processes("scorer", speaking_at_s=10.0 + SILENCE_S - 0.1)
    assert not log.processes("scorer", speaking_at_s=10.0 + SILENCE_S)
    assert log.processes("scorer")
    assert log.heard_s("scorer") == 10.0
    assert log.heard_s("batcher") == float("-inf")


def test_a_process_is_forgotten_once_another_of_its_service_speaks_without_it() -> None:
    log, all_kept = HeartbeatLog(), HeartbeatLog(keeps_ended=True)
    for one in (log, all_kept):
        one.add(beat("scorer", "1-a"), 0.0)
        one.add(beat("batcher", "9-c"), 0.0)
        one.add(beat("scorer", "2-b"), SILENCE_S)
    assert [one.instance for one in log.newest()] == ["2-b", "9-c"], "no other batcher speaks"
    assert [one.instance for one in all_kept.newest()] == ["1-a", "2-b", "9-c"]


def test_the_clock_of_a_sender_does_not_make_others_look_old() -> None:
    log = HeartbeatLog()
    log.add(beat("scorer", "1-a", sent_s=0.0), 100.0)
    log.add(beat("scorer", "2-b", sent_s=5000.0), 100.5)
    assert len(log.processes("scorer", speaking_at_s=101.0)) == 2


def test_growth_is_over_the_window_and_by_the_senders_clock() -> None:
    log = HeartbeatLog(window_s=2.0)
    for second in range(6):
        log.add(beat("scorer", sent_s=10.0 + second, handled=second**2), float(second))
    (one,) = log.processes("scorer")
    assert [at for at, _ in one.beats] == [2.0, 3.0, 4.0, 5.0], "one from before the window, to count from"
    assert one.growth(lambda stage: stage.handled) == (25 - 4) / 3
    assert one.growth(lambda stage: stage.lag) is None, "unknown is not 0"
    log.add(beat("batcher"), 5.0)
    assert log.processes("batcher")[0].growth(lambda stage: stage.handled) is None, "one heartbeat shows no growth"
