"""A group over its lease goes on without its heaviest samples, which it names; one that fits is left as it is."""

from functools import partial

import numpy as np
import pytest

from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.group_environment import SequenceExtras
from lachesis.pipeline.environment.inference_requests import InferenceRequests
from lachesis.pipeline.environment.oversized import leave_out_oversized
from lachesis.pipeline.environment.rollout import GroupDraft, SampleFailure, build_group
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.codec import decode
from lachesis.schemas.columns import Column, as_bytes
from lachesis.schemas.rollout import RolloutGroup

TASK = Task(item="i", prompt="q")
BUILD = partial(build_group, run="r", env="e", producer="p", epoch=1, counter=1, tokenizer_hash="t")


def draft_of(sizes, **fields):
    """Samples of so many tokens, each with an advantage, a column and an override that name the sample."""
    requests, sessions = InferenceRequests(FakeInference(lambda *_: ""), CollectConfig(), None), []
    draw = np.random.default_rng(0)
    for number, size in enumerate(sizes):
        session = Session.of_group(TASK, number, requests, SamplingParams())
        session.tokens = draw.integers(0, 9999, size).tolist()
        session.loss_mask, session.logprobs = [False, *[True] * (size - 1)], [0.0, *[-1.0] * (size - 1)]
        session.versions = [(0, "0-a-b")]
        sessions.append(session)
    own = np.repeat(np.arange(len(sizes)), sizes)
    extras = SequenceExtras(
        token_advantages=as_bytes(own, "float32"),
        columns={"c": Column(dtype="int16", data=as_bytes(np.stack([own, own], 1), "int16"), width=2)},
        excluded_samples=sorted({0, len(sizes) - 1}),
        metadata={"overrides": [{"n": n} for n in range(len(sizes))]},
    )
    return GroupDraft(
        id="0" * 32, task=TASK, sessions=sessions, rewards=[{"r": float(n)} for n in range(len(sizes))],
        sampling=SamplingParams(), started_ns=1, extras=extras, **{"failures": [], **fields},
    )  # fmt: skip


def fitted(draft, largest, samples=None):
    samples = len(draft.sessions) if samples is None else samples
    return leave_out_oversized(draft, BUILD, env="e", samples=samples, largest=largest)


def test_a_group_that_fits_is_as_it_was():
    draft = draft_of([3000, 10, 10])
    same, group, data = fitted(draft, 60_000)
    assert same is draft
    assert decode(RolloutGroup, data) == group == BUILD(draft)


def test_the_heaviest_samples_are_left_out_and_named_and_all_else_keeps_its_place():
    draft = draft_of([50, 4000, 60, 3000, 70])
    fewer, group, data = fitted(draft, 20_000)
    assert len(data) <= 20_000
    assert [failure.sample for failure in fewer.failures] == [1, 3]
    assert all("20,000 bytes for 5 samples" in failure.error for failure in fewer.failures)
    assert "4,000 tokens" in fewer.failures[0].error
    assert group.metadata["failed_samples"][0]["sample"] == 1
    assert group.metadata["overrides"] == [{"n": 0}, {"n": 2}, {"n": 4}]
    assert group.sequences.rewards == {"r": [0.0, 2.0, 4.0]}
    assert group.sequences.excluded_samples == [0, 2]
    column = np.frombuffer(group.sequences.columns["c"].data, np.int16).reshape(-1, 2)
    for number, sequence, place in zip((0, 2, 4), group.sequences, np.cumsum([0, 50, 60]), strict=True):
        assert sequence.tokens.tolist() == draft.sessions[number].tokens
        assert set(sequence.token_advantages) == {number}
        assert (column[place : place + len(sequence.tokens)] == number).all()


def test_no_more_is_left_out_than_has_to_be():
    fewer, _, _ = fitted(draft_of([3000, 3100, 10, 10]), 45_000)
    assert [failure.sample for failure in fewer.failures] == [1]


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [([4000, 10], 20_000), ([4000, 4000, 10], 30_000), ([1000] * 6, 2_000), ([4000], 10_000)],
)
def test_where_that_does_not_help_the_whole_group_is_what_is_refused(sizes, largest):
    draft = draft_of(sizes)
    same, _, data = fitted(draft, largest)
    assert same is draft
    assert len(data) > largest


def test_no_sample_within_its_share_is_left_out():
    draft = draft_of([200] * 8)
    assert not fitted(draft, len(fitted(draft, 10**9)[2]) - 1, samples=4)[0].failures


def test_failures_of_before_stay():
    draft = draft_of([50, 4000, 60], failures=[SampleFailure(sample=9, error="bug", text="")])
    assert [failure.sample for failure in fitted(draft, 10_000)[0].failures] == [1, 9]
