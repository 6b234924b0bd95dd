"""Samples of several sequences: each sampled token is trained once, and their number biases nothing."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.normalizer.estimators.estimator import RewardGroup
from lachesis.pipeline.normalizer.estimators.rloo import Rloo
from lachesis.pipeline.trainer.config import LossConfig
from lachesis.pipeline.trainer.loss import loss_denominator, policy_loss
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.sequences import training_sequences
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ledger import GroupRef
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import RolloutGroup, Sequences, VersionSpan

AGGREGATIONS = ["token_mean", "sequence_mean", "constant_length"]


def sequence(mask, logprobs, advantage, sample, *, index=0, group="a" * 32):
    mask = np.array(mask, np.bool_)
    return TrainingSequence(
        tokens=np.ones(len(mask), np.int32), loss_mask=mask, logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        advantage=advantage, group_id=group, sample=sample, index=index,
    )  # fmt: skip


def gradients(sequences, now, config, max_tokens=None):
    """Return the loss and its gradient with respect to the current logprob of each trained token, row by row.

    `now`: by row, the current logprobs of its trained tokens. `max_tokens`: of a micro-batch.
    """
    batch = pack(sequences)
    logprobs = torch.zeros(batch.mask_BT.shape)
    for row, values in enumerate(now):
        logprobs[row, batch.mask_BT[row]] = torch.tensor(values)
    logprobs.requires_grad_()
    denominator, loss = loss_denominator(batch, config), 0.0
    for rows, part in batch.microbatches(max_tokens or batch.tokens_BT.numel()):
        values = logprobs[rows, : part.tokens_BT.shape[1]]
        output = policy_loss(values, torch.zeros_like(values), part, config, denominator=denominator)
        output.loss.backward()
        loss += output.loss.item()
    return loss, [logprobs.grad[row][batch.mask_BT[row]].tolist() for row in range(len(sequences))]


@st.composite
def samples(draw):
    """Samples as lists of sequences, each the (rollout, current) logprobs of its trained tokens."""
    logprob = st.floats(-3, -0.0625, width=32)
    token = st.tuples(logprob, logprob)
    sizes = st.lists(st.lists(token, min_size=1, max_size=5), min_size=1, max_size=4)
    return draw(st.lists(st.tuples(sizes, st.floats(-2, 2, width=32)), min_size=1, max_size=4))


def rows(found, *, split):
    """Return the training sequences, and by row the current logprobs; without `split` a sample is one sequence."""
    made, now = [], []
    for sample, (parts, advantage) in enumerate(found):
        for index, tokens in enumerate(parts if split else [list(itertools.chain(*parts))]):
            old, new = zip(*tokens, strict=True)
            made.append(sequence([False] + [True] * len(old), [0, *old], advantage, sample, index=index))
            now.append(new)
    return made, now


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(found=samples(), aggregation=st.sampled_from(AGGREGATIONS), objective=st.sampled_from(["ppo", "cispo", "sapo"]),
       max_tokens=st.integers(1, 40))  # fmt: skip
def test_splitting_a_sample_into_sequences_changes_no_gradient(found, aggregation, objective, max_tokens):
    config = LossConfig(objective=objective, aggregation=aggregation, constant_length=7)
    whole_loss, whole = gradients(*rows(found, split=False), config)
    split_loss, split = gradients(*rows(found, split=True), config, max_tokens)
    assert split_loss == pytest.approx(whole_loss, rel=1e-5, abs=1e-6)
    assert list(itertools.chain(*split)) == pytest.approx(list(itertools.chain(*whole)), rel=1e-5, abs=1e-6)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(found=samples(), aggregation=st.sampled_from(AGGREGATIONS))
def test_sequences_that_share_evenly_weigh_the_same_and_their_sample_what_it_does_as_one(found, aggregation):
    found = [([[(-1.0, -1.0)] * len(part) for part in parts], 1.0) for parts, _ in found]  # gradients are weights
    config = LossConfig(aggregation=aggregation, constant_length=7, sharing="sequences")
    _, split = gradients(*rows(found, split=True), config)
    _, whole = gradients(*rows(found, split=False), config)
    by_row = iter(split)
    for (parts, _), of_sample in zip(found, whole, strict=True):
        sums = [sum(next(by_row)) for _ in parts]
        assert sums == pytest.approx([sum(of_sample) / len(parts)] * len(parts), rel=1e-5)


REWARDS = {(0,): 0.3, **{(1, *said): float(said == (0, 0)) for said in itertools.product((0, 1), repeat=2)}}
"""What an agent gets that ends at once (0), or starts two sub-agents (1), each of which then says 0 or 1."""


def logprobs_of(theta):
    """Return the logprobs of the agent's choice, and of each of its sub-agents', which have parameters in common."""
    return theta.log_softmax(-1)[[0, 1, 1]]


def expected_gradient(theta, n, make):
    """Return the exact expectation of the loss's gradient over all groups of n samples. `make`: their sequences."""
    choices, total = list(REWARDS), torch.zeros_like(theta)
    config = LossConfig(aggregation="constant_length", constant_length=1, clip_low=0.9, clip_high=9.0)
    for group in itertools.product(choices, repeat=n):
        parameters = theta.clone().requires_grad_()
        log = logprobs_of(parameters)
        probability = float(torch.stack([log[i, a].detach() for one in group for i, a in enumerate(one)]).sum().exp())
        sequences, places = make(group, log)
        batch = pack(sequences)
        now = torch.zeros(batch.mask_BT.shape, dtype=theta.dtype)
        for row, values in enumerate(places):
            now[row, 1:] = values
        output = policy_loss(now, now.detach(), batch, config, denominator=loss_denominator(batch, config))
        output.loss.backward()
        total += probability * parameters.grad
    return total


def by_sample(group, log):
    """The pipeline's rule: one advantage a sample, by a baseline over samples."""
    advantages = Rloo().estimate(RewardGroup([REWARDS[one] for one in group], 1e-3))
    chosen = [(sample, i, log[i, a]) for sample, one in enumerate(group) for i, a in enumerate(one)]
    made = [sequence([False, True], [0, p.item()], advantages[sample], sample, index=i) for sample, i, p in chosen]
    return made, [p for _, _, p in chosen]


def by_sequence(group, log):
    """What is not done: each sequence a sample of its own, in the baseline and in the loss."""
    chosen = [(REWARDS[one], i, log[i, a]) for one in group for i, a in enumerate(one)]
    advantages = Rloo().estimate(RewardGroup([reward for reward, _, _ in chosen], 1e-3))
    made = [
        sequence([False, True], [0, p.item()], advantage, row)
        for row, ((_, _, p), advantage) in enumerate(zip(chosen, advantages, strict=True))
    ]
    return made, [p for _, _, p in chosen]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_the_expected_gradient_is_that_of_the_expected_reward_whatever_number_of_sequences_it_takes(n):
    theta = torch.tensor([[0.3, -0.2], [0.1, 0.0]], dtype=torch.float64, requires_grad=True)
    log = logprobs_of(theta)
    value = sum(
        torch.stack([log[i, a] for i, a in enumerate(one)]).sum().exp() * reward for one, reward in REWARDS.items()
    )
    (exact,) = torch.autograd.grad(value, theta)
    found = expected_gradient(theta.detach(), n, by_sample)
    torch.testing.assert_close(found, -exact, rtol=1e-6, atol=1e-7)
    biased = expected_gradient(theta.detach(), n, by_sequence)  # it is not even a multiple of the right one
    assert biased[0, 0] / biased[1, 0] > 1.3 * found[0, 0] / found[1, 0]


def rollout(parts):
    """A group of samples, each given as sequences of (tokens, mask)."""
    flat = [one for sample in parts for one in sample]
    lengths = [len(tokens) for tokens, _ in flat]
    masks = np.concatenate([np.array(mask, np.bool_) for _, mask in flat])
    group = RolloutGroup(
        id="b" * 32, run="r", env="e", item="i", producer="p", epoch=1, counter=1, policy_versions=["1-lin-abcd"],
        sequences=Sequences(
            offsets=as_bytes(np.cumsum([0, *lengths]), "int32"),
            tokens=as_bytes([token for tokens, _ in flat for token in tokens], "int32"),
            loss_mask=pack_mask(masks), logprobs=as_bytes(np.where(masks, -1.0, 0.0), "float32"),
            finish_reasons=["stop"] * len(flat), version_spans=[VersionSpan(i, 0, 0) for i in range(len(flat))],
            sample_index=[sample for sample, of_sample in enumerate(parts) for _ in of_sample],
        ),
        tokenizer_hash="0" * 64, started_ns=1,
    )  # fmt: skip
    group.check()
    return group


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("sharing", ["tokens", "sequences"])
def test_a_forked_sample_has_the_gradient_of_its_sampled_tokens_each_alone_in_its_context(aggregation, sharing):
    config = LossConfig(aggregation=aggregation, constant_length=3, sharing=sharing)
    parts = [[([1, 2, 3, 4, 5], [0, 0, 0, 1, 1]), ([7, 8], [0, 1]), ([1, 2, 3, 6, 9, 10], [0, 0, 1, 0, 1, 1])],
             [([1, 2, 11, 12], [0, 0, 1, 1])]]  # fmt: skip
    advantages = [1.5, -0.5]
    group = rollout(parts)
    ref = GroupRef(group=group.id, seq=1, env="e", sequences=2, tokens=group.sequences.n_tokens, policy_step=1,
                   advantages=advantages)  # fmt: skip
    model = build_tiny_policy(0, width=16, layers=1, heads=2).model.double()

    def logprobs(tokens):
        return model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)

    batch = pack(training_sequences(ref, group, None, TrainerLimits()))
    assert batch.trainable_tokens == 8  # of 17 tokens; 3 lies in two sequences and is counted once
    for _, part in batch.microbatches(6):
        now = torch.zeros(part.mask_BT.shape, dtype=torch.float64)
        for row, length in enumerate(part.lengths_B.tolist()):
            tokens = part.tokens_BT[row, :length]
            now[row, 1:length] = logprobs(tokens.tolist())[:-1].gather(-1, tokens[1:, None])[:, 0]
        now_on_policy = dataclasses.replace(part, logprobs_BT=now.detach() * part.mask_BT)
        policy_loss(
            now, now.detach(), now_on_policy, config, denominator=loss_denominator(batch, config)
        ).loss.backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()

    # by hand: each sampled token once, after the tokens before it
    total = torch.zeros((), dtype=torch.float64)
    counts = [[sum(mask) for _, mask in sample] for sample in parts]
    divisor = {"token_mean": 8, "sequence_mean": 2, "constant_length": 2 * 3}[aggregation]
    for sample, of_sample, advantage in zip(parts, counts, advantages, strict=True):
        for (tokens, mask), count in zip(sample, of_sample, strict=True):
            weight = 1.0 if sharing == "tokens" else sum(of_sample) / (len(of_sample) * count)
            weight /= sum(of_sample) if aggregation == "sequence_mean" else 1
            for at in np.flatnonzero(mask):
                total = total - weight * advantage * logprobs(tokens[:at])[-1, tokens[at]]
    (total / divisor).backward()
    by_hand = torch.cat([one.grad.flatten() for _, one in model.named_parameters() if one.grad is not None])
    packed = torch.cat([one.flatten() for one in found.values()])
    assert (packed - by_hand).norm() <= 1e-6 * by_hand.norm()
