"""Groups whose code takes far longer than that of others is named, and ended; inference does not count."""

from lachesis.pipeline.environment.group_times import GroupTimes


def after(groups: int, took_s: float, *, limit_s: float = 900.0, turn_s: float = 60.0) -> GroupTimes:
    """Return times after so many groups that took so long."""
    times = GroupTimes(limit_s, turn_s)
    for number in range(groups):
        times.begin(number, 0.0)
        times.end(number, took_s, answered=True)
    return times


def begin(times: GroupTimes, group: str, item: str, now_s: float) -> None:
    times.begin(group, now_s, what=f"item {item}")


def described(times: GroupTimes, now_s: float) -> str | None:
    late = times.late(now_s)
    return None if late is None else times.describe(late)


def test_a_group_is_late_by_what_others_took() -> None:
    times = after(0, 0.0)
    begin(times, "a", "1", 0.0)
    assert times.late(59.0) is None
    assert described(times, 61.0) == (
        "its code holds up groups: 1 of 1 groups under way hangs, the longest (item 1) for 61 s; none was answered "
        "yet; they are ended after 900 s"
    )
    times.end("a", 62.0, answered=True)
    begin(times, "b", "2", 100.0)
    begin(times, "c", "3", 400.0)
    assert times.late(700.0) is None, "62 s were enough for one of them, so 600 s are not out of the question"
    late = described(times, 721.0)
    assert late is not None
    assert "1 of 2 groups under way hangs, the longest (item 2) for 621 s; the slowest of the last took 62.0 s" in late
    times.end("b", 722.0, answered=False)
    assert times.late(723.0) is None


def test_where_the_usual_is_known_it_is_named_within_seconds_and_ended_by_that() -> None:
    times = after(8, 0.2)
    begin(times, "a", "1", 0.0)
    assert times.late(6.0) is None
    late = described(times, 8.0)
    assert late is not None
    assert late.endswith("they are ended after 120 s")
    assert times.hanging(119.0) == []
    assert [(one.call, one.what, one.age_s) for one in times.hanging(121.0)] == [("a", "item 1", 121.0)]
    assert after(8, 10.0).end_s == 300.0
    assert after(8, 1000.0).end_s == 900.0
    assert after(8, 0.2, limit_s=50.0).end_s == 50.0
    assert after(7, 0.2).end_s == 900.0, "too little is known yet"


def test_a_request_under_way_is_no_hanging_code_however_long_it_takes() -> None:
    """The server may be away: that is said elsewhere, and loses no conversation."""
    times = after(8, 0.2)
    begin(times, "a", "1", 0.0)
    times.record_wait("a", 1, 1.0)
    times.record_wait("a", 1, 2.0)
    times.record_wait("a", -1, 3.0)
    assert times.late(4000.0) is None
    assert times.hanging(4000.0) == []
    times.record_wait("a", -1, 4000.0)
    assert times.hanging(4100.0) == []
    assert len(times.hanging(4121.0)) == 1
    times.end("a", 4121.0, answered=True)
    assert times.end_s == 900.0, "121 s of code were usual once"
    times.record_wait("a", -1, 5000.0)  # of a group that has ended


def test_a_group_is_not_ended_for_a_time_in_which_the_process_was_stopped() -> None:
    times = after(8, 0.2)
    begin(times, "a", "1", 0.0)
    for now_s in (1.0, 200.0):
        times.check_clock(now_s)
    assert times.late(200.0) is None
    assert times.hanging(200.0) == []


def test_what_hung_before_is_named_again_when_it_hangs_again() -> None:
    times = after(8, 0.2)
    for episode in range(3):
        began_s = 1000.0 * (episode + 1)
        for number in range(4):
            times.begin(number, began_s)
        late = described(times, began_s + 8.0)
        assert late is not None, episode
        assert "the slowest of the last took 0.2 s" in late
        assert times.end_s >= 30 * 20.0 * (episode > 0), "20 s were enough for some, so none is ended soon after"
        for number in range(4):
            times.end(number, began_s + 20.0, answered=True)
    begin(times, "a", "1", 9000.0)
    assert times.late(9008.0) is None, "this environment takes so long now and then"
    assert times.late(9201.0) is not None
