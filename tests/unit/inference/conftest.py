"""A tiny random policy and a running engine over it."""

import pytest
import torch

from lachesis.pipeline.inference.config import EngineConfig
from lachesis.pipeline.inference.engine import Engine
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


@pytest.fixture
def start_engine(policy):
    """Return a function that makes an engine over the policy; enter it with `with`."""

    def make(**limits):
        config = EngineConfig(**limits)
        return Engine(policy.model, eos_token_id=policy.tokenizer.eos_token_id, weight_version=VERSION, config=config)

    return make
