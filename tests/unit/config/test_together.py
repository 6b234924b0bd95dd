"""Which services share a process: what may be configured, and what processes that makes."""

import pytest

from lachesis.pipeline.config.run import RunConfig, ServicesConfig
from lachesis.pipeline.environment.config import EnvironmentConfig
from lachesis.pipeline.health.config import HealthConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.planned_processes import planned_processes, planned_services
from lachesis.services.process.role import ProcessRole


def configured(*together: list[str], teachers: int = 1, health: bool = True) -> RunConfig:
    return RunConfig(
        environments={"sums": EnvironmentConfig(kind="spell_backward")},
        services=ServicesConfig(together=list(together), teachers=teachers),
        health=HealthConfig(enabled=health),
    )


@pytest.mark.parametrize(
    ("together", "said"),
    [
        (
            [["batcher", "normaliser"]],
            "'normaliser' is none of the services that can share a process; did you mean 'normalizer'?",
        ),
        ([["batcher", "trainer"]], "trainer needs a process of its own, because it computes for seconds"),
        ([["batcher", "environment"]], "environment needs a process of its own, because it runs code of yours"),
        ([["batcher", "scorer"]], "scorer needs a process of its own, because it runs code of yours"),
        ([["batcher"]], "two services or more"),
        ([[]], "two services or more"),
        ([["batcher", "batcher"]], "names batcher twice"),
        ([["batcher", "health"], ["health", "governor"]], "names health twice"),
    ],
)
def test_what_cannot_share_a_process_is_refused_by_name(together: list[list[str]], said: str) -> None:
    with pytest.raises(ConfigError, match=r"^services\.together") as refused:
        configured(*together)
    assert said in str(refused.value)


def test_replicas_are_processes_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"services\.teachers is 2: replicas are processes of their own"):
        configured(["batcher", "teacher"], teachers=2)


def test_services_that_share_a_process_are_planned_as_one_and_speak_each_by_its_name() -> None:
    apart, shared = configured(), configured(["health", "batcher"], ["governor", "normalizer", "teacher"])
    names = [row.name for row in planned_processes(shared)]
    assert {"batcher+health", "governor+normalizer"} <= set(names)
    assert not {"batcher", "health", "governor", "normalizer", "teacher"} & set(names), "the run has no teacher"
    assert len(names) == len(planned_processes(apart)) - 2
    assert planned_services(shared) == planned_services(apart)


def test_a_service_that_is_left_alone_is_an_ordinary_process() -> None:
    names = [row.name for row in planned_processes(configured(["batcher", "health"], health=False))]
    assert "batcher" in names
    assert "batcher+health" not in names


def test_a_process_is_given_its_services_by_its_name() -> None:
    assert ProcessRole.of("batcher+health").services == ("batcher", "health")
    assert ProcessRole.of("environment", "sums").name == "environment-sums"
    for process, part in (("batcher+trainer", ""), ("batcher+", ""), ("batcher+health", "sums")):
        with pytest.raises(ConfigError, match=r"^batcher\+"):
            ProcessRole.of(process, part)
