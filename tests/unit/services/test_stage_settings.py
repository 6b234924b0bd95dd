"""Each stage of the pipeline gets settings of its own; one of an extension gets the configuration of the run."""

import dataclasses

import pytest
from msgspec.structs import asdict

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.extension import ServiceSpec
from lachesis.services import registry
from lachesis.services.stage_settings import SETTINGS

CONFIG = RunConfig(run="r", model="m", environments={"sums": EnvironmentConfig(kind="x")})


def values_in(settings):
    """Yield the settings and all values in them, at any depth."""
    yield settings
    if dataclasses.is_dataclass(settings):
        inner = [getattr(settings, field.name) for field in dataclasses.fields(settings)]
    elif hasattr(settings, "__struct_fields__"):
        inner = list(asdict(settings).values())
    elif isinstance(settings, dict):
        inner = list(settings.values())
    else:
        inner = list(settings) if isinstance(settings, list | tuple) else []
    for one in inner:
        yield from values_in(one)


@pytest.mark.parametrize("name", registry.CORE)
def test_a_stage_of_the_pipeline_gets_no_configuration_of_a_whole_run(name):
    part = registry.CORE[name].part
    found = list(values_in(SETTINGS[name](CONFIG, *(() if part is None else (part,)))))
    assert len(found) > 2
    assert not any(isinstance(one, RunConfig) for one in found)


async def test_a_stage_that_stands_in_for_the_trainer_gets_the_whole_configuration(monkeypatch):
    got = []

    async def stage(service, config):
        got.append(config)

    monkeypatch.setattr(registry, "load_place", lambda place: stage)
    await registry.load_stage(dataclasses.replace(registry.CORE["trainer"], stage="elsewhere:train"))(None, CONFIG, "")
    await registry.load_stage(ServiceSpec("gateway", "elsewhere:serve", 1, "of an extension"))(None, CONFIG, "")
    await registry.load_stage(registry.CORE["trainer"])(None, CONFIG, "")
    assert got[:2] == [CONFIG, CONFIG]
    assert type(got[2]).__name__ == "TrainerSettings"
