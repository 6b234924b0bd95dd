"""The teacher's terms against an independent float64 reference and finite differences: K + 1 outcomes, and spans."""

import math

import numpy as np
import pytest
import torch

from lachesis.pipeline.model import logit_memory
from lachesis.pipeline.model.logprobs import SampledLogprobs
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.loss import LossMetrics, loss_denominator, policy_loss
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.schemas.errors import DataError

VOCABULARY, K = 11, 3


def distribution(draw, shape):
    logits = draw.normal(0, 1.5, (*shape, VOCABULARY))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def likeliest(teacher_TV, k=K):
    """The teacher's columns as they travel: ids, and logprobs of those and of all others, in half precision."""
    ids = np.argsort(-teacher_TV, axis=-1)[:, :k]
    top = np.take_along_axis(teacher_TV, ids, -1)
    tail = np.log1p(-np.exp(top).sum(-1, keepdims=True))
    return ids.astype(np.int32), np.concatenate([top, tail], -1).astype(np.float16).astype(np.float32)


def a_batch(seed):
    """Three sequences, the last without a teacher, one position with fewer likeliest tokens; the policy's logits."""
    draw = np.random.default_rng(seed)
    sequences, logits = [], []
    for row, length in enumerate((5, 7, 4)):
        topk = likeliest(distribution(draw, (length,)))
        if row == 1:
            topk[0][3, 2], topk[1][3, 2] = -1, -np.inf
        logits.append(distribution(draw, (length,)))
        sequences.append(
            TrainingSequence(
                tokens=draw.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask=(np.arange(length) > 0) & (draw.random(length) < 0.8),
                logprobs=-draw.uniform(0.05, 3, length).astype(np.float32),
                advantage=float(draw.normal()),
                teacher_logprobs=None if row == 2 else -draw.uniform(0.05, 3, length).astype(np.float32),
                teacher_topk=None if row == 2 else topk,
            )
        )
    return pack(sequences), sequences, logits


def reference_kl(policy_V, ids, teacher, kind):
    """KL over the teacher's tokens and all others as one, one outcome at a time. `policy_V`: logprobs."""
    named = [(int(i), float(lp)) for i, lp in zip(ids, teacher, strict=False) if i >= 0]
    p = [math.exp(lp) for _, lp in named] + [math.exp(float(teacher[-1]))]
    p = [value / sum(p) for value in p]
    q = [math.exp(policy_V[i]) for i, _ in named]
    q.append(sum(math.exp(policy_V[v]) for v in range(VOCABULARY) if v not in {i for i, _ in named}))
    one, other = (q, p) if kind == "reverse" else (p, q)
    return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True))


def others(logits_BTV, ids_BTK):
    logprobs = logits_BTV.log_softmax(-1)
    rest = logprobs.scatter(-1, ids_BTK, -1e4).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, ids_BTK), rest], -1)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_kl_over_likeliest_tokens_and_its_gradient(kind, seed):
    batch, sequences, logits = a_batch(seed)
    config = LossConfig(teacher_coef=0.7, teacher_kl=kind)
    plain = LossConfig()
    width = batch.tokens_BT.shape[1]
    given = np.stack([np.pad(one, ((0, width - len(one)), (0, 0))) for one in logits])
    now = torch.tensor(given, dtype=torch.float64, requires_grad=True)
    sampled = batch.logprobs_BT.double()
    output = policy_loss(
        sampled, torch.zeros_like(sampled), batch, config, denominator=loss_denominator(batch, config),
        others_BTC=others(now, batch.teacher_ids_BTK),
    )  # fmt: skip
    output.loss.backward()
    without = policy_loss(
        sampled, torch.zeros_like(sampled), batch, plain, denominator=loss_denominator(batch, plain)
    ).loss.item()

    def reference(values):
        total = []
        for row, sequence in enumerate(sequences):
            for t in np.flatnonzero(sequence.loss_mask if sequence.teacher_topk else []):
                policy = values[row, t] - math.log(sum(math.exp(v) for v in values[row, t]))
                ids, teacher = (column[t] for column in sequence.teacher_topk)
                total.append(reference_kl(policy, ids, teacher, kind))
        return sum(total), len(total)

    kl, tokens = reference(given)
    assert output.loss.item() - without == pytest.approx(0.7 * kl / batch.trainable_tokens, rel=1e-6)
    assert LossMetrics.from_sums(output.sums).teacher_kl_topk == pytest.approx(kl / tokens, rel=1e-6)
    step = 1e-6
    for place in [(0, 2, 1), (1, 3, 4), (1, 4, 0), (1, 5, 7), (2, 2, 2)]:
        values = []
        for sign in (1, -1):
            moved = given.copy()
            moved[place] += sign * step
            values.append(0.7 * reference(moved)[0] / batch.trainable_tokens)
        difference = (values[0] - values[1]) / (2 * step)
        assert now.grad[place].item() == pytest.approx(difference, rel=1e-5, abs=1e-8), place


def test_all_other_tokens_count_as_one():
    """Without them a policy that hardly ever says what the teacher says would be as near as can be."""
    teacher, policy = [0.5, 0.2, 0.1], [0.05, 0.02, 0.01]
    topk = np.log(np.array([[1, 1, 1, 1], [*teacher, 0.2]], np.float32))
    one = TrainingSequence(
        tokens=np.array([1, 2], np.int32), loss_mask=np.array([False, True]), logprobs=np.array([0, -1], np.float32),
        advantage=0.0, teacher_logprobs=np.array([0, -1], np.float32),
        teacher_topk=(np.array([[-1, -1, -1], [4, 5, 6]], np.int32), topk),
    )  # fmt: skip
    batch = pack([one])
    others_BTC = torch.tensor([[[0.0] * 4, [*policy, 0.92]]]).log()
    found = {}
    for kind in ("forward", "reverse"):
        config = LossConfig(teacher_coef=1.0, teacher_kl=kind)
        found[kind] = policy_loss(
            batch.logprobs_BT, batch.logprobs_BT, batch, config, denominator=1, others_BTC=others_BTC
        ).loss.item()
    assert found["forward"] == pytest.approx(0.8 * math.log(10) + 0.2 * math.log(0.2 / 0.92), rel=1e-5)
    assert found["forward"] == pytest.approx(1.54, abs=0.005)
    assert found["reverse"] == pytest.approx(0.08 * math.log(0.1) + 0.92 * math.log(0.92 / 0.2), rel=1e-5)


@pytest.mark.parametrize("slice_bytes", [1 << 28, 4 * 101 * 3], ids=["one slice", "slices"])
def test_a_models_logprobs_of_given_tokens_are_those_of_all_logits(small_policy, batch, monkeypatch, slice_bytes):
    monkeypatch.setattr(logit_memory, "CPU_SLICE_BYTES", slice_bytes)
    policy, data = small_policy(), batch(small_policy(), 0)
    ids = torch.randint(0, 100, (*data.tokens_BT.shape, K), generator=torch.Generator().manual_seed(0))
    sampled = SampledLogprobs(policy.model)
    logprobs, entropy, found = sampled.with_alternatives(data.tokens_BT, 1.3, data.mask_BT, ids)
    plain, plain_entropy = sampled(data.tokens_BT, 1.3, data.mask_BT)
    torch.testing.assert_close(logprobs, plain)
    torch.testing.assert_close(entropy, plain_entropy)
    logits = policy.model(input_ids=data.tokens_BT).logits[:, :-1] / 1.3
    expected = torch.nn.functional.pad(others(logits, ids[:, 1:]), (0, 0, 1, 0))
    torch.testing.assert_close(found[data.mask_BT], expected[data.mask_BT], atol=1e-5, rtol=1e-5)
    assert not found[~data.mask_BT].any()


def test_a_span_is_one_action_and_all_of_its_tokens_get_its_distance():
    config = LossConfig(teacher_coef=0.5, anchor="proximal", tis_cap=None)
    now = [0.0, -0.3, -0.7, -1.1, -0.2]
    one = TrainingSequence(
        tokens=np.arange(5, dtype=np.int32), loss_mask=np.array([False, True, True, True, True]),
        logprobs=np.array([0, -0.4, -0.4, -0.4, -0.4], np.float32), advantage=1.0,
        teacher_logprobs=np.array([0, -2.5, 0, -0.6, 0], np.float32),
        teacher_spans=np.array([-1, 1, 1, 3, -1], np.int32),
    )  # fmt: skip
    batch = pack([one, TrainingSequence(
        tokens=one.tokens, loss_mask=one.loss_mask, logprobs=one.logprobs, advantage=1.0,
        teacher_logprobs=np.array([0, -0.5, -0.5, -0.5, -0.5], np.float32),
    )])  # fmt: skip
    logprobs = torch.tensor([now, now], requires_grad=True)
    output = policy_loss(logprobs, torch.zeros(2, 5), batch, config, denominator=1)
    output.loss.backward()
    pair, alone = now[1] + now[2] + 2.5, now[3] + 0.6
    advantages = [[1 - 0.5 * pair, 1 - 0.5 * pair, 1 - 0.5 * alone, 1], [1 - 0.5 * (lp + 0.5) for lp in now[1:]]]
    w = np.exp(np.array(now[1:]) + 0.4)  # with no cap the surrogate has no weight, and rho is 1
    assert w.max() < 2
    assert logprobs.grad[:, 1:].flatten().tolist() == pytest.approx([-a for row in advantages for a in row], rel=1e-5)
    assert LossMetrics.from_sums(output.sums).teacher_kl_k1 == pytest.approx(
        (pair + alone + sum(lp + 0.5 for lp in now[1:])) / 7, rel=1e-5
    )


@pytest.mark.parametrize("kind", ["sampled", "reverse", "forward"])
def test_the_teachers_values_change_the_gradient(small_policy, kind):
    """Two teachers that differ in one token's values alone must not give the same step."""

    def weights_after(shift, coef=1.0):
        policy, draw = small_policy(), np.random.default_rng(4)
        teacher = distribution(draw, (8,))
        teacher[5] = np.roll(teacher[5], shift)
        ids, topk = likeliest(teacher)
        sequence = TrainingSequence(
            tokens=draw.integers(5, VOCABULARY, 8).astype(np.int32), loss_mask=np.arange(8) > 2,
            logprobs=np.full(8, -2, np.float32), advantage=0.5,
            teacher_logprobs=teacher[:, 0].astype(np.float32), teacher_topk=(ids, topk),
        )  # fmt: skip
        config = LearnerConfig(warmup_steps=0, loss=LossConfig(teacher_coef=coef, teacher_kl=kind))
        learner = Learner(policy.model, config)
        learner._gradient(pack([sequence]), 1)
        return torch.cat([value.grad.flatten() for value in policy.model.parameters() if value.grad is not None])

    assert not torch.equal(weights_after(0), weights_after(3))
    assert torch.equal(weights_after(0), weights_after(0))
    assert torch.equal(weights_after(0, coef=0.0), weights_after(3, coef=0.0))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"teacher_spans": np.array([-1, 2, 2, 2], np.int32)}, "begins after its token"),
        ({"teacher_spans": np.array([-1, 1, 1, 2], np.int32)}, "inside of another span"),
        ({"teacher_spans": np.array([0, 0, 2, 3], np.int32)}, "partly under"),
        ({"teacher_topk": (np.zeros((4, 2), np.int32), np.zeros((4, 2), np.float32))}, "teacher_topk of shapes"),
        ({"teacher_topk": (np.zeros((4, 1), np.int32), np.full((4, 2), 0.5, np.float32))}, "teacher_topk logprobs"),
    ],
)
def test_columns_that_cannot_be_right_are_refused(change, text):
    sequence = TrainingSequence(
        tokens=np.arange(4, dtype=np.int32), loss_mask=np.array([False, True, True, True]),
        logprobs=np.full(4, -1, np.float32), advantage=1.0, teacher_logprobs=np.full(4, -1, np.float32), **change,
    )  # fmt: skip
    with pytest.raises(DataError, match=text):
        pack([sequence])


@pytest.mark.parametrize("kind", ["sampled", "reverse"])
def test_self_distillation_has_the_gradient_of_the_kl_to_the_same_model_that_reads_the_answer(kind):
    """By all answers of two tokens of a vocabulary of four: sum_t KL(pi(.|x, y<t) || pi(.|c, x, y<t)), no gradient
    through the teacher and none through how likely the tokens before are."""
    torch.manual_seed(0)
    size, question, privileged = 4, [0, 1], [0, 3, 2, 1]
    model = torch.nn.ModuleDict(
        {"all": torch.nn.EmbeddingBag(size, 6, mode="mean"), "head": torch.nn.Linear(6, size)}
    ).double()

    def logprobs(prompt, answer):
        contexts = torch.tensor([[*prompt, *answer]])
        return model["head"](model["all"](contexts) * len(prompt + answer))[0].log_softmax(-1)

    def gradient(value):
        return torch.cat(
            [one.flatten() for one in torch.autograd.grad(value, list(model.parameters()), retain_graph=True)]
        )

    pairs = [[a, b] for a in range(size) for b in range(size)]
    exact, found = 0.0, 0.0
    config = LossConfig(teacher_coef=1.0, teacher_kl=kind)
    for pair in pairs:
        policy = [logprobs(question, pair[:t]) for t in range(2)]
        teacher = [logprobs(privileged, pair[:t]).detach() for t in range(2)]
        chance = math.exp(sum(policy[t][pair[t]].item() for t in range(2)))
        kl = sum((policy[t].exp() * (policy[t] - teacher[t])).sum() for t in range(2))
        exact = exact + chance * gradient(kl)
        sampled = torch.stack([policy[t][pair[t]] for t in range(2)])
        pad = np.zeros(len(question), np.float32)
        topk_ids = np.tile(np.arange(size - 1, dtype=np.int32), (4, 1))
        rest = np.full((2, size), np.log(1 / size), np.float32)
        sequence = TrainingSequence(
            tokens=np.array([*question, *pair], np.int32),
            loss_mask=np.array([False, False, True, True]),
            logprobs=np.concatenate([pad, sampled.detach().numpy()]).astype(np.float32),
            advantage=0.0,
            teacher_logprobs=np.concatenate([pad, [float(teacher[t][pair[t]]) for t in range(2)]]).astype(np.float32),
            teacher_topk=(topk_ids, np.concatenate([rest, torch.stack(teacher).numpy()]).astype(np.float32)),
        )
        batch = pack([sequence])
        now = torch.cat([torch.zeros(2, dtype=torch.float64), sampled])[None]
        alternatives = torch.cat([torch.zeros(2, size, dtype=torch.float64), torch.stack(policy)])[None]
        output = policy_loss(now, torch.zeros_like(now), batch, config, denominator=1, others_BTC=alternatives)
        found = found + chance * gradient(output.loss)
    assert exact.abs().max() > 0.01
    torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-6)
