"""Groups that take far longer than others did are named."""

from lachesis.pipeline.environments.group_times import GroupTimes


def test_a_group_is_late_by_what_others_took() -> None:
    times = GroupTimes(900.0)
    times.begin("a", "1", 0.0)
    assert times.describe_late(59.0) is None
    assert times.describe_late(61.0) == (
        "1 of 1 groups under way hang, the longest (item 1) for 61 s, and none was made yet; a rollout is ended after "
        "900 s (rollout_timeout_s)"
    )
    times.end("a", 62.0, made=True)
    times.begin("b", "2", 100.0)
    times.begin("c", "3", 400.0)
    assert times.describe_late(700.0) is None, "62 s were enough for one of them, so 600 s are not out of the question"
    late = times.describe_late(721.0)
    assert late is not None
    assert late.startswith("1 of 2 groups under way hang, the longest (item 2) for 621 s, where the slowest")
    times.end("b", 722.0, made=False)
    assert times.describe_late(723.0) is None
