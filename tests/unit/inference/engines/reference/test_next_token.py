"""Sampling: processed logprobs, nucleus, greedy, and agreement of draws with probabilities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.inference.engines.reference.next_token import draw, read_draw, row_settings

LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))


def drawn(logits, temperature, top_p, uniform):
    settings = row_settings(temperature, top_p, uniform)
    return draw(logits, settings.values, has_nucleus=settings.has_nucleus)


def processed_logprobs(logits, temperature, top_p):
    return drawn(logits, temperature, top_p, [0.5] * len(logits)).logprobs


def sample(logits, temperature, top_p, uniform):
    return read_draw(drawn(logits, temperature, top_p, uniform).drawn)


def test_temperature_scales_the_logits():
    logprobs = processed_logprobs(LOGITS, [2.0], [1.0])
    expected = np.array([0.5, 0.3, 0.15, 0.05]) ** 0.5
    assert logprobs[0].exp().tolist() == pytest.approx(expected / expected.sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4)]
)
def test_nucleus_keeps_the_fewest_tokens_that_reach_top_p_and_renormalises(top_p, kept):
    probabilities = processed_logprobs(LOGITS.flip(1), [1.0], [top_p]).exp()[0].flip(0)
    assert (probabilities > 0).sum().item() == kept
    expected = np.array([0.5, 0.3, 0.15, 0.05])[:kept]
    assert probabilities[:kept].tolist() == pytest.approx(expected / expected.sum(), rel=1e-5)


def test_rows_have_settings_of_their_own():
    logprobs = processed_logprobs(LOGITS.repeat(3, 1), [1.0, 0.0, 1.0], [1.0, 1.0, 0.6])
    assert logprobs[0].exp().tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05], rel=1e-5)
    assert logprobs[1].tolist() == pytest.approx(logprobs[0].tolist())
    assert logprobs[2].exp().tolist() == pytest.approx([0.625, 0.375, 0, 0], rel=1e-5)
    tokens, values = sample(LOGITS.repeat(3, 1), [1.0, 0.0, 1.0], [1.0, 1.0, 0.6], [0.96, 0.96, 0.96])
    assert tokens == [3, 0, 1]
    assert values == pytest.approx([math.log(0.05), math.log(0.5), math.log(0.375)], rel=1e-5)


@given(st.floats(0, 1, exclude_max=True), st.floats(0.01, 1.0), st.integers(0, 10_000))
def test_a_token_outside_the_nucleus_is_never_drawn(uniform, top_p, seed):
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed)) * 3
    logprobs = processed_logprobs(logits, [1.0], [top_p])
    (token,), (value,) = sample(logits, [1.0], [top_p], [uniform])
    assert math.isfinite(value)
    assert value == logprobs[0, token].item()


def test_evenly_spread_draws_hit_tokens_in_proportion():
    n = 2000
    tokens, _ = sample(LOGITS.repeat(n, 1), [1.0] * n, [1.0] * n, [(i + 0.5) / n for i in range(n)])
    assert np.bincount(tokens, minlength=4) / n == pytest.approx(np.array([0.5, 0.3, 0.15, 0.05]), abs=1e-3)


def test_broken_weights_are_not_sampled_from():
    with pytest.raises(FloatingPointError, match="NaN"):
        sample(torch.full((1, 4), torch.nan), [1.0], [1.0], [0.5])
