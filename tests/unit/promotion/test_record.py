"""What a service makes of a promotion that another build wrote, and how often who judges is looked up."""

import msgspec
import pytest

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.promotion.record import InForce, promotion, under, write
from lachesis.pipeline.scoring.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scoring.stage import run_scorer
from lachesis.schemas.annotations import ScoreEvent
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.promotion import Promotion, Promotions

CONFIG = RunConfig(
    run="r",
    environments={"sums": EnvironmentConfig(kind="x")},
    scoring=ScoringConfig(raters=[RaterConfig(rater="exact_match")]),
)


def promoted(**normalization) -> Promotion:
    one = promotion(CONFIG, "new", by="me", asked_ns=1)
    sums = one.environments["sums"]
    judging = msgspec.structs.replace(sums, normalization={**sums.normalization, **normalization})
    return msgspec.structs.replace(one, environments={"sums": judging}, first=2)


@pytest.mark.parametrize("setting", [{"of_a_newer_build": 1}, {"window": -1}])
def test_settings_that_this_build_does_not_take_say_what_to_do(setting):
    with pytest.raises(ConfigError, match=r"revision new, environment sums: .*; upgrade this service"):
        under(promoted(**setting), CONFIG)


async def test_scorers_wait_with_what_a_newer_build_judges_and_go_on_with_the_rest(lab):
    await write(lab.bus, Promotions(run="r", promotions=[promoted(of_a_newer_build=1)]), "live", expected=0)
    for n in (1, 2):
        await lab.store(lab.group(n, task={"answer": "2"}))
    async with lab.running(lambda service: run_scorer(service, CONFIG), "scorer") as service:

        async def waiting() -> bool:
            return service.vitals.retried >= 2 and bool(await lab.events("score", ScoreEvent))

        await lab.until(waiting)
    assert [item.seq for event in await lab.events("score", ScoreEvent) for item in event.groups] == [1]


async def test_what_is_delivered_says_how_far_a_look_reaches(lab, monkeypatch):
    """One look serves all who asked before it, and asks nobody for the end of ROLLOUTS."""
    await write(lab.bus, Promotions(run="r", promotions=[promoted()]), "live", expected=0)
    monkeypatch.setattr(lab.bus, "usage", None)
    in_force = InForce(lab.bus, "r", "live")
    found = [await in_force.at(seq) for seq in (5, 1, 4)]
    assert [one and one.first for one in found] == [2, None, 2]
    monkeypatch.setattr(lab.bus, "last", None)
    assert (await in_force.at(3)).first == 2
