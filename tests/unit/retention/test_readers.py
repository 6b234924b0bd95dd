"""Which services of a run claim history."""

import pytest

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.retention.readers import Readers
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.subjects import EVENTS
from lachesis.services.stage_settings import reader_settings


@pytest.mark.extension
@pytest.mark.parametrize(("strategy", "claiming"), [("irt", {"own", "theirs"}), ("sec", {"own"}), ("epoch", {"own"})])
async def test_nobody_claims_rewards_for_a_curriculum_that_there_is_not(strategy: str, claiming: set[str]) -> None:
    """No stage reads those of a gateway's environment then: they could never be trimmed, and EVENTS would fill up."""
    config = RunConfig(
        run="r",
        environments={"own": EnvironmentConfig(kind="spell_backward"), "theirs": EnvironmentConfig(kind="gateway")},
        curriculum=CurriculumConfig(strategy=strategy),
    )
    claims = await Readers(Service(MemoryBus(), "governor", "r"), reader_settings(config)).claims()
    rewards = {subjects.event("reward", "r", "live", env): env for env in config.environments}
    held = [claim for claim in claims if claim.stream == EVENTS and claim.holder.startswith("curriculum")]
    assert {rewards[claim.subject] for claim in held if claim.subject in rewards} == claiming


@pytest.mark.parametrize(("strategy", "claiming"), [("irt", {"own", "gone"}), ("sec", {"own"}), ("epoch", {"own"})])
async def test_an_environment_that_the_run_no_longer_has_is_claimed_for_as_one_whose_tasks_nothing_draws(
    strategy: str, claiming: set[str]
) -> None:
    config = RunConfig(
        run="r",
        environments={"own": EnvironmentConfig(kind="spell_backward")},
        curriculum=CurriculumConfig(strategy=strategy),
    )
    claims = await Readers(Service(MemoryBus(), "gc", "r"), reader_settings(config), ["gone"]).claims()
    rewards = {subjects.event("reward", "r", "live", env): env for env in ("own", "gone")}
    held = {claim.subject for claim in claims if claim.stream == EVENTS and claim.holder.startswith("curriculum")}
    assert {rewards[subject] for subject in held & rewards.keys()} == claiming
