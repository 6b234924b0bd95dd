"""Memory that runs out in a step: smaller micro-batches, layers computed again, and an error that helps."""

import msgspec
import pytest
import torch

from lachesis.pipeline.errors import OutOfMemoryError
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer import learner as learner_module
from lachesis.pipeline.trainer import step_memory_fit
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.memory import how_to_save_memory, is_out_of_memory, shortage_of
from lachesis.pipeline.trainer.numerics import microbatch_at, with_microbatch
from lachesis.pipeline.trainer.step_memory_fit import FailedPass, FitWish, StepFit, describe_fit
from lachesis.schemas.ledger import Numerics

CPU = torch.device("cpu")
CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 4.25 GiB is "
    "free. Including non-PyTorch memory, this process has 74.85 GiB memory in use."
)
CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:125] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "40000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
ERRORS = [torch.OutOfMemoryError(CUDA_TEXT), RuntimeError(CPU_TEXT), RuntimeError("not enough memory: 8 bytes")]


def limit_memory(model, tokens, error=ERRORS[0], *, backward=False, recompute_helps=False):
    """Let passes over more than so many padded tokens run out of memory, as the model's first layer would."""
    layer = model.model.layers[0]

    def check(width_BTH):
        if width_BTH.shape[:2].numel() > tokens and not (recompute_helps and layer.gradient_checkpointing):
            torch.rand(3)  # a failed pass may have drawn
            raise error

    if backward:
        layer.mlp.register_full_backward_hook(lambda _module, gradients, _outputs: check(gradients[0]))
    else:
        layer.register_forward_pre_hook(lambda _module, args: check(args[0]) if torch.is_grad_enabled() else None)


def comparable(metrics):
    return msgspec.structs.replace(metrics, seconds=0.0, memory=None)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("error", ERRORS, ids=["GPU", "CPU", "CPU, Windows"])
def test_the_step_is_done_again_in_halves_from_the_same_weights(small_policy, batch, error, backward):
    found = []
    for limit in (40, None):
        policy = small_policy()
        torch.manual_seed(5)
        if limit:
            limit_memory(policy.model, limit, error, backward=backward)
            learner = Learner(policy.model, LearnerConfig(max_tokens_per_microbatch=1000))
        else:  # as if it had been set so
            learner = Learner(policy.model, LearnerConfig(max_tokens_per_microbatch=found[0][0][0].microbatch_tokens))
        steps = [learner.step(batch(small_policy(), seed)) for seed in range(3)]
        found.append((steps, weights_digest(policy_tensors(policy.model)), torch.get_rng_state().tolist()))
    (steps, *state), (expected, *same) = found
    assert steps[0].microbatch_tokens <= 40
    assert [comparable(step) for step in steps] == [comparable(step) for step in expected]
    assert state == same
    assert f"max_tokens_per_microbatch = {steps[0].microbatch_tokens}" in steps[0].memory
    assert [step.memory for step in expected] == [None] * 3


def test_the_size_that_fits_is_kept_until_the_settings_change(small_policy, batch):
    policy, seen = small_policy(), []
    limit_memory(policy.model, 40)
    learner = Learner(policy.model, LearnerConfig(max_tokens_per_microbatch=1000))
    learner.step(batch(small_policy(), 0))
    kept = learner.fit
    policy.model.model.layers[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0].shape[:2].numel()))
    learner.configure(LearnerConfig(max_tokens_per_microbatch=1000, learning_rate=1e-4, max_step_kl=None))
    learner.step(batch(small_policy(), 0))
    assert learner.fit == kept
    assert max(seen) <= kept.tokens
    learner.configure(LearnerConfig(max_tokens_per_microbatch=999))
    assert learner.fit.tokens == 999


def test_layers_are_computed_again_once_a_sequence_alone_does_not_fit(small_policy, batch):
    policy = small_policy()
    limit_memory(policy.model, 6, recompute_helps=True)
    learner = Learner(policy.model, LearnerConfig(max_tokens_per_microbatch=1000))
    metrics = learner.step(batch(small_policy(), 0))
    assert metrics.microbatch_tokens == 1000
    assert metrics.memory.endswith("training.learner.recompute_layers = true begins so")
    assert policy.model.model.layers[0].gradient_checkpointing
    plain = Learner(small_policy().model, LearnerConfig(max_tokens_per_microbatch=1000)).step(batch(small_policy(), 0))
    assert comparable(metrics) == comparable(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "help_text"),
    [
        ({}, "What helps: shorter sequences"),
        ({"recompute_layers": True}, "What helps: shorter sequences"),
        ({"recompute_layers": False}, "What helps: training.learner.recompute_layers = true"),
    ],
)
def test_a_sequence_that_never_fits_is_an_error_that_says_what_is_missing(small_policy, batch, settings, help_text):
    policy = small_policy()
    limit_memory(policy.model, 3)
    learner = Learner(policy.model, LearnerConfig(**settings))
    before, state = weights_digest(policy_tensors(policy.model)), torch.get_rng_state()
    missing = int(20.5 * 2**30) - int(4.25 * 2**30)
    with pytest.raises(
        OutOfMemoryError, match=rf"tokens alone does not .* at least {missing:,} bytes are missing"
    ) as e:
        learner.step(batch(small_policy(), 0))
    assert help_text in str(e.value)
    assert "training.lora = {}" in str(e.value)
    assert weights_digest(policy_tensors(policy.model)) == before
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert learner.steps == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_that_ends_in_the_optimizer_is_told_of_too(small_policy, batch, monkeypatch):
    learner = Learner(small_policy().model, LearnerConfig())

    def step(*_):
        raise ERRORS[1]

    monkeypatch.setattr(learner.optimizer, "step", step)
    with pytest.raises(OutOfMemoryError, match="an optimizer step does not fit into memory: 40,000,000,000,000 bytes"):
        learner.step(batch(small_policy(), 0))


def test_other_errors_pass_as_they_are(small_policy, batch):
    policy, other = small_policy(), RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    limit_memory(policy.model, 3, other)
    with pytest.raises(RuntimeError) as error:
        Learner(policy.model, LearnerConfig()).step(batch(small_policy(), 0))
    assert error.value is other
    assert not is_out_of_memory(other)
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(MemoryError())


@pytest.mark.parametrize(
    ("error", "requested", "free"),
    [
        (ERRORS[0], int(20.5 * 2**30), int(4.25 * 2**30)),
        (ERRORS[1], 40_000_000_000_000, None),
        (MemoryError(), None, None),
    ],
)
def test_the_bytes_of_an_error_are_read(error, requested, free):
    found = shortage_of(error, CPU)
    assert found.requested == requested
    assert found.free == free if free else found.free > 0
    if requested:
        assert f"at least {requested - found.free:,} bytes are missing" in str(found)


def test_this_machines_own_error_is_known():
    """torch's own text, of an allocation that no machine can give."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    assert shortage_of(error.value, CPU).requested == 1 << 60


def test_ranks_decide_alike():
    fit = StepFit.of(1000, "auto", can_recompute=True)
    content, half, other = FitWish(), FitWish(tokens=300), FitWish(tokens=200)
    assert fit.after([content, half, other]).tokens == 200
    again = fit.after([half, FitWish(recompute=True)])
    assert (again.tokens, again.recomputes) == (1000, True)
    with pytest.raises(OutOfMemoryError, match="no hope"):
        fit.after([half, FitWish(hopeless="no hope")])
    failed = FailedPass(rows=2, tokens=500, shortage="")
    assert fit.wish_after(failed, "") == FitWish(tokens=250)
    assert fit.wish_after(None, "").is_content
    single = FailedPass(rows=1, tokens=500, shortage="")
    assert fit.wish_after(single, "") == FitWish(recompute=True)
    assert again.wish_after(single, "").hopeless
    assert StepFit.of(1000, "auto", can_recompute=False).wish_after(single, "").hopeless
    assert StepFit.of(1000, False, can_recompute=True).wish_after(single, "").hopeless
    assert describe_fit(fit, "auto") is None
    assert describe_fit(StepFit.of(1000, True, can_recompute=True), True) is None


def test_help_names_only_what_is_not_in_force():
    everything = how_to_save_memory(recomputes=False, adapters=False, sharded=False)
    assert all(name in everything for name in ("recompute_layers", "longest_tokens", "lora", "sharding"))
    assert how_to_save_memory(recomputes=True, adapters=True, sharded=False) == (
        "shorter sequences (environments.NAME.longest_tokens and max_new_tokens)"
    )


def test_sizes_are_recorded_from_the_step_on_that_they_are_of():
    settings = msgspec.json.encode(LearnerConfig(max_tokens_per_microbatch=64)).decode()
    numerics = Numerics(torch="", processor="", instructions="", threads=1, learner=settings)
    assert with_microbatch(numerics, 3, 64) is numerics
    halved = with_microbatch(with_microbatch(numerics, 3, 32), 7, 16)
    assert with_microbatch(halved, 8, 16) is halved
    assert [microbatch_at(halved, step) for step in (0, 2, 3, 6, 7, 100)] == [64, 64, 32, 32, 16, 16]


def test_steps_after_one_that_filled_the_memory_are_divided_more_finely(small_policy, batch, monkeypatch):
    """torch's allocator then gives memory back and asks again, which waits for the GPU each time."""
    retries = iter([0, 3, 3, 4, 4, 5, 5, 5])  # before and after the passes of each step
    monkeypatch.setattr(learner_module, "allocator_retries", lambda _device: next(retries))
    given = batch(small_policy(), 0)
    longest = given.tokens_BT.shape[1]
    learner = Learner(small_policy().model, LearnerConfig(max_tokens_per_microbatch=5 * longest))
    sizes = [learner.step(given).microbatch_tokens for _ in range(4)]
    assert sizes == [5 * longest, 5 * longest // 2, 5 * longest // 4, 5 * longest // 4], "never less than a sequence"


def test_steps_grow_again_once_there_is_room_and_ever_later():
    fit = StepFit.of(1000, False, can_recompute=True)
    fit = msgspec.structs.replace(fit, wait_steps=2)
    tight, calm = [FitWish(is_tight=True)], [FitWish()]
    seen = []
    for _ in range(3000):
        fit = fit.after_step(tight if fit.tokens == 1000 else calm, 10)
        seen.append(fit.tokens)
    assert seen[:4] == [500, 500, 1000, 500], "two calm steps, then whole again, which is too much"
    waits = [len(run) for run in "".join("x" if tokens == 500 else " " for tokens in seen).split()]
    assert waits[:4] == [2, 4, 8, 16]
    assert fit.tokens == 500
    assert seen.count(1000) == len(waits) - 1 < 10, "at last it stays as it is"


def test_steps_do_not_grow_beyond_what_ran_out_of_memory():
    fit = StepFit.of(1000, False, can_recompute=True).after([FitWish(tokens=400)])
    fit = fit.after_step([FitWish(is_tight=True)], 10)
    assert fit.tokens == 200
    for _ in range(3000):
        fit = fit.after_step([FitWish()], 10)
    assert fit.tokens == 400
    assert fit.after([FitWish(recompute=True)]).tokens == 1000


@pytest.mark.parametrize(("device", "grown"), [("cpu", 250), ("cuda", 1000)])
def test_a_later_life_begins_with_what_fitted_and_grows_on_a_gpu(device, grown):
    fit = StepFit.of(1000, False, can_recompute=True).beginning_with(250, device)
    assert fit.tokens == 250
    for _ in range(1000):
        fit = fit.after_step([FitWish()], 10)
    assert fit.tokens == grown
    assert StepFit.of(100, False, can_recompute=True).beginning_with(250, device).tokens == 100


@pytest.mark.slow
def test_a_learner_grows_its_micro_batches_again(small_policy, batch, monkeypatch):
    retries = iter([0, 3, *[3] * 99])  # the first step alone finds no memory left
    monkeypatch.setattr(learner_module, "allocator_retries", lambda _device: next(retries))
    given = batch(small_policy(), 0)
    most = 4 * given.tokens_BT.shape[1]
    learner = Learner(small_policy().model, LearnerConfig(max_tokens_per_microbatch=most))
    sizes = [learner.step(given) for _ in range(step_memory_fit.CALM_STEPS + 2)]
    assert [one.microbatch_tokens for one in sizes] == [most, *[most // 2] * step_memory_fit.CALM_STEPS, most]
    assert sizes[1].memory is not None
    assert sizes[-1].memory is None


def test_a_recorded_step_is_not_divided_more_finely(small_policy, batch, monkeypatch):
    retries = iter(range(9))
    monkeypatch.setattr(learner_module, "allocator_retries", lambda _device: next(retries))
    learner = Learner(small_policy().model, LearnerConfig(max_tokens_per_microbatch=1000))
    learner.spares_memory = False
    assert [learner.step(batch(small_policy(), seed)).microbatch_tokens for seed in range(2)] == [1000, 1000]


def test_micro_batches_do_not_grow_where_a_pass_cannot_be_begun_again():
    fit = StepFit.of(1000, False, can_recompute=False).after_step([FitWish(is_tight=True)], 10, may_grow=False)
    assert fit.tokens == 500
    for _ in range(2000):
        fit = fit.after_step([FitWish()], 10, may_grow=False)
    assert fit.tokens == 500


@pytest.mark.parametrize(
    ("wishes", "longest", "expected"),
    [([False, True], 40, 50), ([False, False], 40, 100), ([True, True], 50, 50), ([True], 51, 100)],
)
def test_all_ranks_go_by_the_one_whose_memory_was_full(wishes, longest, expected):
    fit = StepFit(configured=100, tokens=100, recomputes=False, may_recompute=True)
    assert fit.after_step([FitWish(is_tight=one) for one in wishes], longest).tokens == expected
    assert all(FitWish(is_tight=one).is_content for one in wishes)
