"""A tiny random policy and a running engine over it."""

from pathlib import Path

import pytest
import torch
from outside import mark_below

from lachesis.pipeline.inference.config import EngineConfig
from lachesis.pipeline.inference.engines.reference import engine as engine_module
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.model.policy import build_tiny_policy

VERSION = "0-first-000000000000"


@pytest.fixture(scope="session")
def _initial():
    policy = build_tiny_policy(0, width=32, layers=2, max_length=96)
    with torch.no_grad():  # sharper than at initialisation, so that wrong weights or positions show
        for parameter in policy.model.parameters():
            parameter.mul_(2)
    return policy


@pytest.fixture
def policy(_initial):
    fresh = build_tiny_policy(0, width=32, layers=2, max_length=96)
    fresh.model.load_state_dict(_initial.model.state_dict())
    return fresh


@pytest.fixture(scope="session")
def _chosen(_initial):
    """What is found once by trials, which take half a second: the way in which such a policy is decoded."""
    return type(engine_module.choose_decoding(_initial.model, 96))


@pytest.fixture
def start_engine(policy, _chosen, monkeypatch):
    """Return a function that makes an engine over the policy; enter it with `with`."""
    monkeypatch.setattr(engine_module, "choose_decoding", lambda model, _: _chosen(model))

    def make(*, ends=policy.tokenizer.eos_token_id, decode=None, **limits):
        config = EngineConfig(**limits)
        return Engine(policy.model, eos_token_id=ends, weight_version=VERSION, config=config, decode=decode)

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave these tests out of `make unit`: they compute with torch."""
    mark_below(Path(__file__).parent, items)
