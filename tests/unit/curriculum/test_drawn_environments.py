"""Every environment of a run has a curriculum, or it is said that it has none and why."""

import logging

import pytest
from stages import run_curriculum

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.drawn_environments import (
    curriculum_environments,
    describe_curriculum,
    reason_no_curriculum,
)
from lachesis.pipeline.curriculum.known_strategies import STRATEGIES
from lachesis.services.cli.health import _print
from lachesis.services.observe.health import read_health
from lachesis.services.stage_settings import curriculum_settings

OWN, FOREIGN = EnvironmentConfig(kind="x"), EnvironmentConfig(kind="gateway")
CONFIG = RunConfig(
    run="r", environments={"sums": OWN, "shop": FOREIGN, "maze": OWN}, curriculum=CurriculumConfig(strategy="sec")
)
NONE = "no curriculum for shop: its clients draw its tasks themselves"


@pytest.mark.extension
def test_what_is_drawn_and_what_is_not_is_said_of_every_environment():
    assert list(curriculum_environments(curriculum_settings(CONFIG))) == ["sums", "maze"]
    first, second = describe_curriculum(curriculum_settings(CONFIG))
    assert first == "curriculum sec: sums, maze"
    assert second.startswith(NONE)
    assert reason_no_curriculum(curriculum_settings(CONFIG), "sums") is None
    assert reason_no_curriculum(curriculum_settings(CONFIG), "unknown") is None
    assert describe_curriculum(curriculum_settings(RunConfig(run="r"))) == []
    (only,) = describe_curriculum(curriculum_settings(RunConfig(run="r", environments={"shop": FOREIGN})))
    assert only.startswith("curriculum irt for shop: of the items that its clients name")


@pytest.mark.extension
@pytest.mark.parametrize("strategy", [*STRATEGIES, "a/file.py:Own"])
def test_a_strategy_learns_about_named_items_unless_it_needs_the_pool_beforehand(strategy):
    config = RunConfig(run="r", environments={"shop": FOREIGN}, curriculum=CurriculumConfig(strategy=strategy))
    reason = reason_no_curriculum(curriculum_settings(config), "shop")
    if strategy in {"uniform", "irt", "gain_per_token", "pools", "a/file.py:Own"}:
        assert reason is None
        assert list(curriculum_environments(curriculum_settings(config))) == ["shop"]
    else:
        assert f"curriculum.strategy {strategy!r} needs the" in reason
        assert not curriculum_environments(curriculum_settings(config))


@pytest.mark.extension
async def test_the_service_names_the_environments_without_one(lab, caplog):
    caplog.set_level(logging.INFO, "lachesis")
    config = RunConfig(run="r", environments={"shop": FOREIGN}, curriculum=CurriculumConfig(strategy="epoch"))
    async with lab.running(lambda service: run_curriculum(service, config), "curriculum") as service:
        await service.started.wait()
        assert (service.vitals.status_text or "").startswith(NONE), "so `status` shows it"
    assert any(record.getMessage().startswith(NONE) for record in caplog.records)


@pytest.mark.extension
async def test_health_says_so_beside_where_the_environment_stands(lab, capsys):
    found = [await read_health(lab.bus, CONFIG, env) for env in ("sums", "shop")]
    assert [health.no_curriculum is None for health in found] == [True, False]
    _print(found, 64)
    shown = capsys.readouterr().out
    assert NONE in shown
    assert "no curriculum for sums" not in shown
