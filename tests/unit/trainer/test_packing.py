"""Rows computed in one: the step of padded rows, cut by tokens, recorded, and only where a comparison agrees."""

import msgspec
import numpy as np
import pytest
import torch

from lachesis.pipeline.model.packed_attention import attends_by, install_packed_attention
from lachesis.pipeline.model.packed_rows import PackedRows
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.config import LearnerConfig, learner_on_record
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.packing import describe_packing
from lachesis.pipeline.trainer.step_size import StepSize, is_measured
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.schemas.errors import ConfigError


def uneven(seed=0, rows=12, longest=40):
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(2.3, 0.8, rows), 2, longest).astype(int)
    return pack(
        [
            TrainingSequence(
                tokens=draw.integers(5, 100, length).astype(np.int32),
                loss_mask=np.arange(length) >= max(1, length // 3),
                logprobs=np.full(length, -4.6, np.float32),
                advantage=draw.normal(),
                teacher_logprobs=np.full(length, -4.0, np.float32),
                group_id=str(row // 3),
            )
            for row, length in enumerate(lengths)
        ]
    )


def steps_of(small_policy, count=3, **settings):
    policy = small_policy()
    config = msgspec.convert({"warmup_steps": 0, "learning_rate": 1e-3, **settings}, LearnerConfig)
    learner = Learner(policy.model, config)
    return learner, [learner.step(uneven(seed)) for seed in range(count)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_tokens_per_microbatch": 50},
        {"recompute_layers": True},
        {"loss": {"objective": "gspo", "aggregation": "sequence_mean", "entropy_coef": 0.1, "teacher_coef": 0.1}},
        {"on_large_step": "shorten", "max_step_kl": 1e-4},
    ],
    ids=["one micro-batch", "several", "layers again", "sequences", "shortened"],
)
def test_steps_are_those_of_padded_rows(small_policy, settings):
    learner, packed = steps_of(small_policy, **settings)
    other, padded = steps_of(small_policy, **settings, packing=False)
    assert learner.packing.packs
    for one, expected in zip(packed, padded, strict=True):
        assert one.packed
        assert not expected.packed
        assert one.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)
        assert one.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert one.padding <= 0.03 < expected.padding
    for name, tensor in policy_tensors(learner.model).items():
        torch.testing.assert_close(tensor, policy_tensors(other.model)[name], rtol=1e-3, atol=2e-5, msg=name)


def test_the_same_steps_give_the_same_bits_and_draw_nothing(small_policy):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    digests = {weights_digest(policy_tensors(steps_of(small_policy)[0].model)) for _ in range(2)}
    assert len(digests) == 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("budget", [30, 60, 10_000])
def test_micro_batches_are_cut_by_tokens(budget):
    data = uneven(rows=30)
    rows, parts = zip(*data.microbatches_of_tokens(budget), strict=True)
    assert sorted(torch.cat(rows).tolist()) == list(range(30))
    for part in parts:
        tokens = int(part.lengths_B.sum())
        assert tokens <= budget or part.sequences == 1
        assert part.tokens_BT.numel() <= 4 * budget or part.sequences == 1
    padded = list(data.microbatches(budget))
    assert len(parts) <= len(padded)
    if budget == 60:
        assert len(parts) < len(padded)


def test_rows_without_padding_stay_as_they_are():
    even = pack([TrainingSequence(tokens=np.full(8, 5, np.int32), loss_mask=np.arange(8) > 1,
                                  logprobs=np.zeros(8, np.float32), advantage=1.0)] * 3)  # fmt: skip
    cpu = torch.device("cpu")
    assert even.on(cpu, in_one_row=True).in_one_row is None
    assert uneven().on(cpu, in_one_row=False).in_one_row is None
    found = uneven().on(cpu, in_one_row=True)
    assert found.computed_tokens == int(found.lengths_B.sum())


def test_each_token_has_its_place():
    rows = PackedRows.of([3, 5, 1, 4], 6, lambda values: values)
    values = torch.arange(24).view(4, 6)
    assert rows.packed(values).tolist() == [[0, 1, 2, 6, 7, 8, 9, 10, 12, 18, 19, 20, 21]]
    assert rows.positions_1N.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 1, 2, 3]]
    assert rows.packed_places(torch.tensor([1, 5, 9, 16])).tolist() == [1, 3, 7, 10]
    assert rows.copies == ()
    grid_G = rows.packed(values)[0][rows.spread_G]
    assert grid_G[rows.back_N].tolist() == rows.packed(values)[0].tolist()
    assert [(grid.rows, grid.width) for grid in rows.grids] == [(2, 5), (1, 3), (1, 1)]


def test_a_model_that_mixes_tokens_beside_attention_keeps_padded_rows(small_policy):
    policy = small_policy()
    mlp = policy.model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x + 0.1 * torch.roll(x, 1, dims=1))  # a shift, which no name tells of
    learner = Learner(policy.model, LearnerConfig())
    assert not learner.step(uneven()).packed
    assert "computes something else with rows in one" in describe_packing(learner.packing)
    assert attends_by(policy.model) == policy.model.config._attn_implementation, "its attention is what it was"
    with pytest.raises(ConfigError, match=r"training\.learner\.packing is true, but LlamaForCausalLM computes"):
        Learner(policy.model, LearnerConfig(packing=True)).step(uneven())


def test_packing_can_be_turned_on_and_off_between_steps(small_policy):
    learner, (first,) = steps_of(small_policy, 1)
    learner.configure(msgspec.structs.replace(learner.config, packing=False))
    second = learner.step(uneven(1))
    learner.configure(msgspec.structs.replace(learner.config, packing=True))
    assert (first.packed, second.packed, learner.step(uneven(2)).packed) == (True, False, True)


def test_records_from_before_are_of_padded_rows_and_of_every_step_measured():
    record = msgspec.json.decode(msgspec.json.encode(LearnerConfig()))
    del record["packing"], record["step_kl_every"]
    old = learner_on_record(msgspec.json.encode(record))
    assert old.packing is False
    assert old.step_kl_every == 1


@pytest.mark.slow
def test_memory_that_runs_out_halves_the_tokens_of_rows_in_one(small_policy):
    policy, seen = small_policy(), []

    def check(_module, args):
        tokens = args[0].shape[:2].numel()
        if torch.is_grad_enabled():
            seen.append(tokens)
            if tokens > 60:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 GiB.")

    policy.model.model.layers[0].register_forward_pre_hook(check)
    learner = Learner(policy.model, LearnerConfig(max_tokens_per_microbatch=1000))
    metrics = learner.step(uneven())
    assert metrics.packed
    assert 30 <= metrics.microbatch_tokens <= 60
    assert metrics.memory is not None
    assert max(seen[-3:]) <= 60


def test_the_attention_of_a_model_without_rows_in_one_is_its_own(small_policy):
    model, tokens = small_policy().model, torch.randint(5, 90, (2, 9))
    expected = model(tokens).logits
    install_packed_attention(model, on=True)
    assert torch.equal(model(tokens).logits, expected)
    install_packed_attention(model, on=False)
    assert model.config._attn_implementation == "sdpa"


def test_few_steps_are_measured_after_the_first_ten():
    config, small, large = LearnerConfig(), StepSize(0.01, 0.01), StepSize(0.5, 0.5)
    assert [step for step in range(20) if is_measured(config, step, small)] == [*range(10), 12, 15, 18]
    assert is_measured(config, 11, large), "one that was too large is followed by one that is measured"
    assert is_measured(LearnerConfig(on_large_step="refuse"), 11, small)
    assert not is_measured(LearnerConfig(max_step_kl=None), 0, None)
