import msgspec
import pytest

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig, TeacherConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import CALLS, EVENTS, ROLLOUTS, TEACHER
from lachesis.services.preflight.budget_check import check_budgets, least_bytes
from lachesis.services.preflight.machine import budgets
from lachesis.services.supervisor.supervisor import Supervisor

CONFIG = RunConfig(
    environments={
        "short": EnvironmentConfig(kind="reasoning_gym", samples=4, longest_tokens=256),
        "long": EnvironmentConfig(kind="reasoning_gym", samples=8, longest_tokens=8192),
        "foreign": EnvironmentConfig(kind="gateway", samples=8, longest_tokens=1 << 20),
    },
    batching=BatchingConfig(batch_size=64),
    normalization=NormalizationConfig(window=16),
    teacher=TeacherConfig(enabled=True),
)


def with_budgets(**sizes: int) -> RunConfig:
    return msgspec.structs.replace(CONFIG, streams=StreamsConfig(**{f"{name}_bytes": n for name, n in sizes.items()}))


@pytest.mark.extension
def test_the_least_budgets_are_a_window_of_each_environment_and_a_batch_of_the_longest() -> None:
    tokens, short = 8 * 8192, 4 * 256
    kept = 16 * 6 * (tokens + short) + 64 // 8 * 6 * tokens + 8 * (8192 * 16 + 4096)
    assert least_bytes(CONFIG)[ROLLOUTS][0] == -(-kept * 10 // 8)
    assert least_bytes(CONFIG)[TEACHER][0] == (64 // 8 + 1) * 4 * tokens * 10 // 8
    assert least_bytes(CONFIG)[EVENTS][0] == (8192 + 8 * 1024) * 10 // 8


@pytest.mark.extension
def test_a_budget_with_which_the_run_would_stop_is_refused_with_the_figure_it_needs() -> None:
    check_budgets(CONFIG)
    least = least_bytes(CONFIG)[ROLLOUTS][0]
    check_budgets(with_budgets(rollouts=least))
    for stream, size in (("rollouts", least - 1), ("teacher", 1 << 20)):
        with pytest.raises(ConfigError, match=rf"streams.{stream}_bytes is {size}, .* environments.long: 8 samples"):
            check_budgets(with_budgets(**{stream: size}))
    with pytest.raises(ConfigError, match=rf"raise it to {least} at least"):
        Supervisor(with_budgets(rollouts=least - 1), [])
    assert budgets(CONFIG).level == "OK"
    assert budgets(with_budgets(rollouts=least - 1)).level == "FAIL"


@pytest.mark.extension
def test_recorded_calls_of_one_group_must_fit_and_those_that_are_not_recorded_need_nothing() -> None:
    least = least_bytes(CONFIG)[CALLS][0]
    assert least == -(-CONFIG.environments["long"].calls_bytes * 10 // 8)
    check_budgets(with_budgets(calls=least))
    with pytest.raises(ConfigError, match=rf"streams.calls_bytes is {least - 1}, .* calls .* environments.long"):
        check_budgets(with_budgets(calls=least - 1))
    silent = {name: msgspec.structs.replace(one, record="never") for name, one in CONFIG.environments.items()}
    check_budgets(msgspec.structs.replace(with_budgets(calls=1 << 20), environments=silent))


def test_without_a_teacher_its_stream_may_be_small() -> None:
    config = msgspec.structs.replace(with_budgets(teacher=1 << 20), teacher=TeacherConfig())
    check_budgets(config)
