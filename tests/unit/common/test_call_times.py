"""A call that takes far longer than others of its kind did is found; one that always takes long is not."""

from lachesis.pipeline.common.call_times import CallTimes


def after(answers: int, took_s: float) -> CallTimes:
    """Return times after so many requests that took so long."""
    times = CallTimes()
    for number in range(answers):
        times.begin(number, 0.0, what="server a", kind="/generate")
        times.end(number, took_s, answered=True)
    return times


def begin(times: CallTimes, call: str, now_s: float, kind: str = "/generate") -> None:
    times.begin(call, now_s, what="server a", kind=kind)


def test_a_call_is_late_by_what_is_usual_of_its_kind() -> None:
    times = after(8, 0.5)
    begin(times, "x", 100.0)
    assert times.late(106.9) is None
    late = times.late(109.0)
    assert late is not None
    assert late.what == "server a"
    assert late.describe("requests") == (
        "1 of 1 requests under way hangs, the longest (/generate) for 9 s; the slowest of the last took 0.5 s"
    )
    times.end("x", 110.0, answered=False)
    assert times.late(200.0) is None
    begin(times, "y", 200.0, "/tokenize")
    assert times.late(259.0) is None, "nothing is known of that route"
    late = times.late(261.0)
    assert late is not None
    assert late.describe("requests").endswith("none was answered yet")


def test_what_always_takes_long_is_not_late_and_what_was_never_begun_is_left_out() -> None:
    times = after(8, 30.0)
    begin(times, "x", 0.0)
    assert times.late(299.0) is None
    assert times.late(301.0) is not None
    begin(times, "x", 400.0)  # sent once more
    assert times.late(500.0) is None
    times.end("never sent", 500.0, answered=True)


def test_a_time_in_which_this_process_was_held_up_makes_no_call_late() -> None:
    """Whatever is timed: after a SIGSTOP of its own, a process has heard no answer, and blames no server for it."""
    times = after(8, 0.5)
    begin(times, "x", 100.0)
    times.check_clock(101.0)
    begin(times, "y", 130.0)
    times.check_clock(141.0)
    assert times.late(146.5) is None
    assert [one.age_s for one in times.older_than(5.0, 146.5)] == [6.5, 5.5]
    assert times.late(148.1) is not None
    for now_s in range(142, 160):
        times.check_clock(now_s)
    assert times.late(160.0) is not None, "a process that looks on time was not held up"


def test_whether_nothing_goes_on_is_told_from_one_late_call_among_others() -> None:
    times = after(8, 0.5)
    begin(times, "x", 100.0)
    assert (late := times.late(109.0)) is not None
    assert late.are_all
    begin(times, "y", 108.0)
    assert (late := times.late(109.0)) is not None
    assert not late.are_all
    times.end("y", 109.0, answered=False)
    assert (late := times.late(109.5)) is not None
    assert late.are_all
