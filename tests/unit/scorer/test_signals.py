"""Signals: what the health checks learn of a group's tokens and logprobs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lachesis.pipeline.scorer.logic.signals import distinct_share, longest_run, signals_of
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.sequences import Sequences


def sequences(rows, **changes):
    """`rows`: by sequence a list of (token, logprob); logprob None: not generated."""
    flat = [pair for row in rows for pair in row]
    fields = {
        "offsets": as_bytes(np.cumsum([0, *map(len, rows)]), "int32"),
        "tokens": as_bytes([token for token, _ in flat], "int32"),
        "loss_mask": pack_mask([lp is not None for _, lp in flat]),
        "logprobs": as_bytes([lp or 0.0 for _, lp in flat], "float32"),
        "finish_reasons": ["stop"] * len(rows),
        "version_spans": [],
    }
    return Sequences(**fields | changes)


def signals(group):
    return signals_of(group)


def test_only_generated_tokens_count():
    rows = [[(7, None), (1, -1.0), (2, -3.0)], [(7, None), (1, 0.0), (2, -0.001)], [(8, None), (1, -1.0), (2, -1.0)]]
    found = signals(sequences(rows, finish_reasons=["stop", "length", "stop"]))
    assert found.logprobs == pytest.approx([-2.0, -0.0005, -1.0])
    assert found.texts[0] == found.texts[1] == found.texts[2]  # prompts differ, answers do not
    assert (found.truncated, found.zeros, found.sure_run, found.unlikely) == (1, 1, 2, [])


def test_a_sample_of_several_sequences_is_one():
    rows = [[(7, None), (1, -1.0)], [(7, None), (2, -3.0)], [(7, None), (1, -2.0)]]
    found = signals(sequences(rows, sample_index=[0, 0, 1], finish_reasons=["length", "stop", "length"]))
    assert found.logprobs == pytest.approx([-2.0, -2.0])
    assert found.truncated == 1  # how a sample's last sequence ended
    assert len(set(found.texts)) == 2


def test_a_sample_without_generated_tokens_has_no_logprob():
    assert signals(sequences([[(1, None), (2, None)], [(1, None), (2, -1.0)]])).logprobs == [None, -1.0]


def test_without_logprobs_the_tokens_alone_tell():
    rows = [[(7, None), (1, -1.0), (2, -3.0)], [(7, None), (1, 0.0), (2, -0.001)]]
    known, found = signals(sequences(rows)), signals(sequences(rows, logprobs=None))
    assert found == replace(known, logprobs=[None, None], zeros=0, sure_run=0)


def test_rare_tokens_against_the_odds():
    rows = [
        [(1, None), (120_000, -20.0), (120_001, -20.0), (5, -20.0)],  # two: the third is no rare one
        [(1, None), (120_000, -1.0), (5, -1.0)],  # rare, but likely here
    ]
    assert signals(sequences(rows)).unlikely == [2, 0]
    assert signals(sequences(rows[1:])).unlikely == []


@given(st.lists(st.lists(st.booleans(), max_size=20), max_size=5))
def test_the_longest_run_ends_with_its_sample(samples):
    cuts = [0, *itertools.accumulate(map(len, samples))]
    flags = np.array([flag for sample in samples for flag in sample], bool)
    text = "0".join("".join("1" if flag else "0" for flag in sample) for sample in samples)
    assert longest_run(flags, [slice(*cut) for cut in itertools.pairwise(cuts)]) == max(map(len, text.split("0")))


@given(st.lists(st.lists(st.sampled_from([0, 1, 2, 3_000_000]), min_size=1, max_size=300), min_size=1, max_size=4))
def test_a_group_is_as_varied_as_its_samples_by_themselves(samples):
    found = signals(sequences([[(1, None), *((token, -1.0) for token in sample)] for sample in samples]))
    shares = [distinct_share(np.array(sample[-256:], np.int32)) for sample in samples if len(sample) >= 32]
    assert found.distinct == (math.fsum(shares) / len(shares) if shares else None)
    long = [sample[-256:] for sample in samples if len(sample) >= 32]
    sets = [set(zip(sample, sample[1:], sample[2:], strict=False)) for sample in long]
    both = sum(len(one & other) for i, one in enumerate(sets) for j, other in enumerate(sets) if i != j)
    every = (len(sets) - 1) * sum(map(len, sets))
    assert found.shared == (pytest.approx(both / every) if len(sets) > 1 else None)


@pytest.mark.parametrize(
    ("generation", "judged", "greedy"),
    [
        ({}, True, False),
        ({"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0}, True, False),
        ({"temperature": 0.0}, False, True),
        ({"temperature": 0}, False, True),
        ({"top_p": 0.1}, False, False),
        ({"top_k": 1}, False, False),
        ({"min_p": 0.5}, False, False),
        ({"temperature": "hot", "top_p": None}, True, False),
    ],
)
def test_where_there_is_one_token_to_choose_from_a_probability_of_one_says_nothing(generation, judged, greedy):
    group = sequences([[(7, None)] + [(1, 0.0)] * 40])
    found = signals_of(group, generation)
    assert (found.zeros, found.sure_run) == ((40, 40) if judged else (0, 0))
    assert found.greedy == greedy
