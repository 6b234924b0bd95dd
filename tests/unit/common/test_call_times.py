"""A server that answers far slower than it did is named, by route; one that always takes long is not."""

from lachesis.pipeline.inference.request_times import RequestTimes


def after(answers: int, took_s: float) -> RequestTimes:
    """Return times after so many requests that took so long."""
    times = RequestTimes()
    for number in range(answers):
        times.begin(number, "server a", "/generate", 0.0)
        times.end(number, took_s, answered=True)
    return times


def test_slowness_is_measured_by_what_is_usual_on_the_route() -> None:
    times = after(8, 0.5)
    times.begin("x", "server a", "/generate", 100.0)
    assert times.describe_slow(106.9) is None
    assert times.describe_slow(109.0) == (
        "server a does not answer: 1 request hangs, the longest (/generate) for 9 s; the slowest of the last ones took "
        "0.5 s"
    )
    times.end("x", 110.0, answered=False)
    assert times.describe_slow(200.0) is None
    times.begin("y", "server a", "/tokenize", 200.0)
    assert times.describe_slow(259.0) is None, "nothing is known of that route"
    assert times.describe_slow(261.0) is not None


def test_what_always_takes_long_is_not_slow_and_what_was_never_sent_is_left_out() -> None:
    times = after(8, 30.0)
    times.begin("x", "server a", "/generate", 0.0)
    assert times.describe_slow(299.0) is None
    assert times.describe_slow(301.0) is not None
    times.begin("x", "server a", "/generate", 400.0)  # sent once more
    assert times.describe_slow(500.0) is None
    times.end("never sent", 500.0, answered=True)


def test_time_in_which_no_answer_could_be_heard_makes_no_request_slow() -> None:
    times = after(8, 0.5)
    times.begin("x", "server a", "/generate", 100.0)
    times.pass_over(40.0)
    assert times.describe_slow(147.0) is None
    assert times.describe_slow(149.0) is not None


def test_whether_nothing_goes_on_is_told_from_one_slow_request_among_others() -> None:
    times = after(8, 0.5)
    assert not times.are_all_slow(100.0)
    times.begin("x", "server a", "/generate", 100.0)
    assert times.are_all_slow(109.0)
    times.begin("y", "server a", "/generate", 108.0)
    assert not times.are_all_slow(109.0)
    assert times.describe_slow(109.0) is not None
    times.end("y", 109.0, answered=False)
    assert times.are_all_slow(109.5)
