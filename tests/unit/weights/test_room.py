"""Whether the stream of weights holds the model's, as start and doctor say it."""

import pytest
from safetensors.torch import save_file

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.pipeline.weights.room import published_bytes
from lachesis.schemas.errors import ConfigError
from lachesis.services.preflight.budget_check import check_budgets
from lachesis.services.preflight.machine import weights

MIB = 1 << 20


@pytest.fixture
def model(tmp_path):
    import torch

    save_file({"a": torch.zeros(4 * MIB, dtype=torch.bfloat16), "b": torch.zeros(MIB)}, tmp_path / "model.safetensors")
    return str(tmp_path)


def run(model, budget=MIB, **settings):
    return RunConfig(model=model, weights=WeightsConfig(**settings), streams=StreamsConfig(weights_bytes=budget))


def test_what_a_version_takes_follows_from_the_dtype_it_travels_in(model):
    assert published_bytes(model, WeightsConfig()) == 20 * MIB
    assert published_bytes(model, WeightsConfig(dtype="bfloat16")) == 10 * MIB
    assert published_bytes("some/model", WeightsConfig()) is None
    assert published_bytes(None, WeightsConfig()) is None


def test_a_budget_that_holds_no_version_is_refused_at_the_start(model):
    check_budgets(run(model))
    for name in (model, None):
        with pytest.raises(ConfigError, match=r"weights\.transport .*streams\.weights_bytes is 1048576"):
            check_budgets(run(name, transport="nats"))
    check_budgets(run(model, 26 * MIB, transport="nats"))
    check_budgets(run(model, 15 * MIB, transport="nats", dtype="bfloat16"))


def test_doctor_says_when_only_one_version_fits(model):
    assert not list(weights(run(model)))
    (tight,) = weights(run(model, 26 * MIB, transport="nats"))
    (ample,) = weights(run(model, 70 * MIB, transport="nats"))
    assert "weights_bytes" in (tight.mend or "")
    assert ample.mend is None
