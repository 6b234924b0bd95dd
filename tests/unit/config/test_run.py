"""What a run's configuration refuses because nothing could ever come of it."""

import pytest

from lachesis.pipeline.batching.config import BatchingConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.schemas.errors import ConfigError


def test_groups_larger_than_a_batch_are_refused_where_they_are_configured() -> None:
    batching = BatchingConfig(batch_size=8)
    RunConfig(batching=batching, environments={"sums": EnvironmentConfig(kind="k", samples=8)})
    RunConfig(batching=batching, evaluation={"sums": EnvironmentConfig(kind="k", samples=9)})  # never batched
    with pytest.raises(ConfigError, match=r"environments\.sums\.samples is 9, but a batch has 8"):
        RunConfig(batching=batching, environments={"sums": EnvironmentConfig(kind="k", samples=9)})


def test_more_new_tokens_than_room_is_reserved_for_are_refused_where_they_are_configured() -> None:
    RunConfig(evaluation={"sums": EnvironmentConfig(kind="k", max_new_tokens=2048)})  # never leased
    with pytest.raises(ConfigError, match=r"max_new_tokens is 2048.*longest_tokens = 1024"):
        RunConfig(environments={"sums": EnvironmentConfig(kind="k", max_new_tokens=2048)})
