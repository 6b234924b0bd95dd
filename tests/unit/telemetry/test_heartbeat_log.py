"""Heartbeats by service and process: what speaks, what has ended, and how figures grew within the window."""

from lachesis.pipeline.telemetry.heartbeat_log import SILENCE_S, HeartbeatLog
from lachesis.schemas.control import Heartbeat, StageState, StageVitals


def beat(service: str, instance: str = "1-a", *, sent_s: float = 0.0, handled: int = 0) -> Heartbeat:
    return Heartbeat(
        host="h",
        schema_version=1,
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


def named(instance: str, replica: str = "gpu-1", *, service: str = "scorer", state: StageState = "ok") -> Heartbeat:
    vitals = StageVitals(state=state)
    pid, _, _ = instance.partition("-")
    return Heartbeat(
        schema_version=1,
        run="r",
        service=service,
        instance=instance,
        pid=int(pid),
        time_ns=0,
        stage=vitals,
        replica=replica,
        host="gpu-1",
    )


def heard(*beats: Heartbeat) -> HeartbeatLog:
    log = HeartbeatLog()
    for at_s, one in enumerate(beats):
        log.add(one, at_s / 2)
    return log


def test_processes_that_speak_in_turn_under_one_name_are_told() -> None:
    log = heard(named("1-a"), named("2-b"), named("1-a"), named("2-b"))
    (shared,) = log.shared_names()
    assert (shared.service, shared.name, shared.places) == ("scorer", "gpu-1", ("pid 1 on gpu-1", "pid 2 on gpu-1"))
    assert log.shared_names("scorer") == [shared]
    assert log.shared_names("teacher") == []
    assert log.has_namesakes()


def test_a_process_that_follows_another_shares_no_name_with_it() -> None:
    log = heard(named("1-a"), named("1-a"), named("2-b"), named("2-b"))
    assert log.shared_names() == []
    assert log.has_namesakes(), "it takes a second heartbeat to know"
    draining = named("1-a", state="draining")
    assert heard(named("1-a"), named("2-b"), draining, named("2-b")).shared_names() == []


def test_other_names_services_and_older_builds_share_none() -> None:
    for other in (named("2-b", "gpu-1-2"), named("2-b", service="teacher")):
        log = heard(named("1-a"), other, named("1-a"), other)
        assert (log.shared_names(), log.has_namesakes()) == ([], False)
    log = heard(beat("scorer", "1-a"), beat("scorer", "2-b"), beat("scorer", "1-a"), beat("scorer", "2-b"))
    assert (log.shared_names(), log.has_namesakes()) == ([], False)
