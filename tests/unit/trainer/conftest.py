"""A small policy, random batches for it, and one torch thread, on which results repeat to the bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from outside import mark_below

from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_policy(seed=0):
    return build_tiny_policy(seed, width=32, layers=2, max_length=48)


def make_batch(policy, seed, rows=6):
    """Random sequences with logprobs of the policy itself and advantages of both signs."""
    draw = np.random.default_rng(seed)
    sequences = []
    for row in range(rows):
        length = int(draw.integers(5, 20))
        tokens = draw.integers(5, 100, length).astype(np.int32)
        with torch.no_grad():
            logprobs = token_logprobs(policy.model, torch.from_numpy(tokens[None].astype(np.int64)), 1.0)[0][0].numpy()
        sequences.append(
            TrainingSequence(
                tokens=tokens,
                loss_mask=np.arange(length) >= 3,
                logprobs=logprobs,
                advantage=(-1.0) ** row * 0.5,
            )
        )
    return pack(sequences)


@pytest.fixture
def small_policy():
    return make_policy


@pytest.fixture
def batch():
    return make_batch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave these tests out of `make unit`: they compute with torch."""
    mark_below(Path(__file__).parent, items)
