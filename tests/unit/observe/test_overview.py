"""What `top` shows of a run as a whole."""

from lachesis.services.observe.overview import RewardCurve, finished, overview_at
from lachesis.services.observe.window import Recent


def test_once_the_last_step_is_taken_no_service_is_silent_and_nothing_is_under_way() -> None:
    overview = overview_at("r", Recent(15.0, {"trainer", "scorer"}), RewardCurve(), 0.0)
    assert {row.state for row in overview.stages} == {"silent"}
    done = finished(overview)
    assert {row.state for row in done.stages} == {"finished"}
    assert (done.outstanding, done.capacity, done.bottleneck) == (None, None, None)
