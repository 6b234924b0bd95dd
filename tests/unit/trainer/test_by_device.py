"""What a learner chooses by its device: fused AdamW, slices of logits, whether these stay, and that nothing waits."""

import traceback

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lachesis.pipeline.model import logit_memory
from lachesis.pipeline.model.logit_memory import CPU_SLICE_BYTES, DeviceMemory, keeps_logits, slice_bytes
from lachesis.pipeline.model.logprobs import SampledLogprobs
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.config import LearnerConfig, learner_on_record
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.optimizer import has_fused_adamw, place_step_counters
from lachesis.pipeline.trainer.step_size import PROBE_TOKENS, probe_tokens

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (DeviceMemory("cpu"), 256 << 20),
        (DeviceMemory("cuda", 16 * GIB), 256 << 20),
        (DeviceMemory("cuda", 40 * GIB), 512 << 20),
        (DeviceMemory("cuda", 80 * GIB), GIB),
        (DeviceMemory("cuda", 141 * GIB), 2 * GIB),
        (DeviceMemory("cuda", 1000 * GIB), 2 * GIB),
    ],
)
def test_slices_of_logits_grow_with_the_memory_of_a_gpu(memory, expected):
    assert slice_bytes(memory) == expected


def test_logits_are_kept_where_they_fit_beside_what_is_still_to_come():
    card = DeviceMemory("cuda", 80 * GIB, free=30 * GIB)
    assert keeps_logits(card, 10 * GIB, GIB, 6 * GIB)
    assert not keeps_logits(card, 20 * GIB, GIB, 6 * GIB)
    assert not keeps_logits(card, 10 * GIB, GIB, 16 * GIB), "gradients have to be allocated yet"
    assert not keeps_logits(card._replace(free=18 * GIB), 10 * GIB, GIB, 0), "the layers' backward pass needs some"
    assert keeps_logits(DeviceMemory("cpu"), logit_memory.CPU_KEPT_BYTES, CPU_SLICE_BYTES, 99 * GIB)
    assert not keeps_logits(DeviceMemory("cpu"), logit_memory.CPU_KEPT_BYTES + 1, CPU_SLICE_BYTES, 0)


@pytest.mark.parametrize("settings", [{}, {"loss": {"entropy_coef": 0.1}}], ids=["plain", "entropy"])
def test_kept_logits_change_no_bit_and_spare_the_second_pass(small_policy, batch, monkeypatch, settings):
    monkeypatch.setattr(logit_memory, "CPU_SLICE_BYTES", 4 * 300 * 7)
    digests, rows = [], []
    for kept in (GIB, 0):
        monkeypatch.setattr(logit_memory, "CPU_KEPT_BYTES", kept)
        policy = small_policy()
        data, seen = batch(policy, 0), []
        policy.model.lm_head.register_forward_hook(lambda _module, _args, out, seen=seen: seen.append(len(out)))
        config = msgspec.convert({"max_step_kl": None, "packing": False, **settings}, LearnerConfig)
        Learner(policy.model, config).step(data)
        digests.append(weights_digest(policy_tensors(policy.model)))
        rows.append(sum(seen) - 4)  # those that the head is tried on
        assert max(seen) <= 20
    trained = data.trainable_tokens
    assert digests[0] == digests[1]
    assert rows == ([2 * trained] * 2 if settings else [trained, 2 * trained])


def test_steps_on_record_from_before_are_computed_as_they_were(small_policy, batch):
    record = msgspec.json.decode(msgspec.json.encode(LearnerConfig()))
    del record["device_kernels"]
    old = learner_on_record(msgspec.json.encode(record))
    assert not old.device_kernels
    policy = small_policy()
    learner = Learner(policy.model, LearnerConfig())
    assert learner.optimizer.param_groups[0]["fused"] is True
    assert learner._sampled.by_device
    learner.step(batch(small_policy(), 0))
    learner.configure(old)
    assert learner.optimizer.param_groups[0]["fused"] is None
    assert not learner._sampled.by_device
    learner.step(batch(small_policy(), 1))

    model = small_policy().model  # the bits of torch's AdamW without a word on how
    plain = torch.optim.AdamW(model.parameters(), lr=old.peak_rate(sum(p.numel() for p in model.parameters())) / 5,
                              betas=(0.9, 0.95), weight_decay=0.0)  # fmt: skip
    again = Learner(small_policy().model, old)
    again.step(batch(small_policy(), 0))
    reference = Learner(model, old)
    reference._gradient(batch(small_policy(), 0), batch(small_policy(), 0).trainable_tokens)
    plain.step()
    assert weights_digest(policy_tensors(model)) == weights_digest(policy_tensors(again.model))


def test_fused_steps_are_the_others_within_rounding(small_policy, batch):
    found = []
    for fused in (True, False):
        policy = small_policy()
        learner = Learner(policy.model, LearnerConfig(device_kernels=fused, warmup_steps=0, learning_rate=1e-3))
        for seed in range(3):
            learner.step(batch(small_policy(), seed))
        found.append(policy_tensors(policy.model))
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-5, atol=1e-6, msg=name)


def test_step_counters_are_where_adamw_wants_them():
    weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.AdamW([weight])
    optimizer.state[weight]["step"] = torch.tensor(3.0)
    optimizer.param_groups[0]["fused"] = True
    place_step_counters(optimizer)
    assert optimizer.state[weight]["step"].device.type == "meta"
    optimizer.state[weight]["step"] = torch.tensor(3.0)
    optimizer.param_groups[0]["fused"] = None
    place_step_counters(optimizer)
    assert optimizer.state[weight]["step"].item() == 3
    assert [has_fused_adamw(kind) for kind in ("cpu", "cuda", "xla")] == [True, True, False]


class _Waits(TorchDispatchMode):
    """Notes each operation whose result the processor needs: on a GPU it waits for it.

    That of transformers, which looks at each pass's positions for packed sequences, is not ours to leave out.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(frame.name == "find_packed_sequence_indices" for frame in traceback.extract_stack()):
            return func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}:
            self.found.append(func)
        if func.overloadpacket.__name__ == "index" and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        ):
            self.found.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("budget", [10_000, 40])
def test_no_pass_waits_for_the_device(small_policy, batch, budget):
    policy = small_policy()
    learner = Learner(policy.model, LearnerConfig(max_tokens_per_microbatch=budget))
    data, parts = batch(policy, 0), []
    on_host = list(learner._microbatches(data))  # cut on the processor, whose tensors these are
    learner._microbatches = lambda _: iter(on_host)
    of_mode = learner._pass
    with _Waits() as waits:
        count = [part.trainable_tokens for _, part in on_host]  # this one is the processor's own
        own = len(waits.found)
        learner._pass = lambda part, *given: (parts.append(part), of_mode(part, *given))[1]
        passes, failed = learner._passes(data, 10)
    assert failed is None
    assert len(parts) == len(on_host)
    assert len(waits.found) == own + len(count), "each micro-batch is counted on the processor, nothing else"
    assert passes.loss.dtype == torch.float64


def test_a_given_number_of_positions_changes_nothing(small_policy, batch):
    policy = small_policy()
    data, sampled = batch(policy, 0), SampledLogprobs(policy.model)
    given = learner_inputs = Learner(policy.model, LearnerConfig()).inputs.of(data)
    counted = learner_inputs._replace(positions=data.trainable_tokens)
    one, other = (sampled(data.tokens_BT, 1.0, data.mask_BT, each)[0] for each in (given, counted))
    assert torch.equal(one, other)


@pytest.mark.parametrize(("padded", "tokens"), [(100, 256), (5_000, 312), (65_536, 1024), (10**7, 1024)])
def test_a_step_that_only_warns_is_measured_on_few_tokens(padded, tokens):
    assert probe_tokens(LearnerConfig(), padded=padded) == tokens
    assert probe_tokens(LearnerConfig(on_large_step="shorten"), padded=padded) == PROBE_TOKENS
