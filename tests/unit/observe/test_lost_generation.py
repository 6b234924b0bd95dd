"""Lost generation is added up over all processes, once each, and shown where there is any."""

from lachesis.schemas.control import Heartbeat, StageVitals
from lachesis.services.observe.lost_generation import LostGeneration, describe_lost_generation
from lachesis.services.observe.overview import RewardCurve, overview_at
from lachesis.services.observe.run_state import STATUS_FIELDS, TOP_FIELDS, project
from lachesis.services.observe.window import Recent


def beat(service: str, replica: int, **metrics: float) -> Heartbeat:
    return Heartbeat(
        run="r", service=service, instance=f"{replica}-{service}", pid=replica, time_ns=1, host="h", schema_version=1,
        stage=StageVitals(state="ok"), metrics={name.replace("__", "/"): value for name, value in metrics.items()},
    )  # fmt: skip


BEATS = [
    beat("governor", 1, flow__lost_seconds=40.0, flow__lost_groups=2.0, flow__leased=9.0),
    beat("environment", 1, environment__a__lost_seconds=1.5, environment__a__lost_groups=1.0),
    beat("environment", 2, environment__a__lost_seconds=2.5, environment__a__resumed_seconds=100.0,
         environment__a__resumed_groups=3.0, environment__b__lost_seconds=6.0),
    beat("trainer", 1, train__lost_seconds=1e9),
]  # fmt: skip
ALL = LostGeneration(seconds=50.0, groups=3, resumed_seconds=100.0, resumed_groups=3)


def test_it_is_the_sum_over_all_processes_and_not_known_where_none_counts_it() -> None:
    assert LostGeneration.of(BEATS) == ALL
    assert LostGeneration.of(BEATS[3:]) is None
    assert LostGeneration.of([]) is None


def test_top_and_status_show_it() -> None:
    recent = Recent(10.0)
    for one in BEATS:
        recent.heartbeat(one, 0.0)
    seen = overview_at("r", recent, RewardCurve(), 0.0)
    assert [project(seen, fields)["lost_generation"] for fields in (STATUS_FIELDS, TOP_FIELDS)] == [ALL, ALL]


def test_it_is_said_where_there_is_any() -> None:
    nothing = LostGeneration(seconds=0.0, groups=0, resumed_seconds=0.0, resumed_groups=0)
    assert [describe_lost_generation(one) for one in (None, nothing)] == ["", ""]
    since = "of finished turns, adding up samples, since the environments' processes started: "
    said = "50 s lost, 3 whole groups; 100 s resumed after a kill, 3 groups"
    assert describe_lost_generation(ALL) == since + said
    begun = LostGeneration(seconds=0.0, groups=0, resumed_seconds=0.0, resumed_groups=2)
    said = "nothing lost, 0 whole groups; nothing resumed after a kill, 2 groups"
    assert describe_lost_generation(begun) == since + said
