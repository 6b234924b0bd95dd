"""Logprobs and entropies by row: on a CPU to the bit those of a softmax of all rows, on a GPU within rounding."""

import sys
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch

from lachesis.pipeline.model import picked_logprobs
from lachesis.pipeline.model.picked_logprobs import has_kernel, pick_logprobs

ROWS = 33


def given(vocabulary, dtype, device="cpu"):
    draw = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(ROWS, vocabulary, generator=draw) * 4).to(dtype)
    logits[0, 5] = -torch.inf
    targets = torch.randint(6, vocabulary, (ROWS,), generator=draw)
    return logits.to(device), targets.to(device), torch.randn(ROWS, generator=draw).to(device)


def by_softmax(logits, targets, gradient, temperature, dtype=torch.float32):
    leaf = logits.clone().requires_grad_()
    all_rows = torch.log_softmax(leaf.to(dtype) / temperature, dim=-1)
    logprobs = all_rows.gather(-1, targets[:, None]).squeeze(-1)
    logprobs.backward(gradient.to(dtype))
    return logprobs.detach(), torch.special.entr(all_rows.detach().exp()).sum(-1), leaf.grad


def by_row(logits, targets, gradient, temperature):
    leaf = logits.clone().requires_grad_()
    logprobs, entropies = pick_logprobs(leaf, targets, temperature)
    assert not entropies.requires_grad
    logprobs.backward(gradient)
    return logprobs.detach(), entropies, leaf.grad


@pytest.fixture(params=[(1, 1), (4, 2), (100, 1)])
def rows(request):
    """Rows of a block; they are computed on as many threads as the second number says."""
    found, threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield found
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocabulary", [37, 5000])
def test_a_cpu_gives_the_bits_of_a_softmax_of_all_rows(vocabulary, temperature, dtype, rows, monkeypatch):
    monkeypatch.setattr(picked_logprobs, "_BLOCK_BYTES", 4 * vocabulary * rows)
    case = given(vocabulary, dtype)
    for expected, found in zip(by_softmax(*case, temperature), by_row(*case, temperature), strict=True):
        assert torch.equal(expected, found)


def test_a_logit_that_is_no_number_is_no_logprob():
    logits, targets, _ = given(37, torch.float32)
    logits[3, 2] = torch.nan
    logprobs, entropies = pick_logprobs(logits, targets, 1.0)
    assert logprobs.isnan().nonzero().tolist() == entropies.isnan().nonzero().tolist() == [[3]]


def test_no_rows_are_no_logprobs():
    logits = torch.zeros(0, 37, requires_grad=True)
    logprobs, entropies = pick_logprobs(logits, torch.zeros(0, dtype=torch.int64), 1.0)
    logprobs.sum().backward()
    assert logprobs.shape == entropies.shape == (0,)
    assert logits.grad.shape == (0, 37)


CANNOT_BUILD = [RuntimeError("Failed to find C compiler."), PermissionError("/.triton"), CalledProcessError(1, "gcc")]


@pytest.mark.parametrize("error", CANNOT_BUILD, ids=["no compiler", "no cache", "no headers"])
def test_where_the_kernel_cannot_be_made_there_is_none_and_the_log_says_why(monkeypatch, caplog, error):
    def fail(*_):
        raise error

    kernels = SimpleNamespace(forward=fail, backward=fail)
    monkeypatch.setitem(sys.modules, "lachesis.pipeline.model.picked_kernels", kernels)
    monkeypatch.setattr(picked_logprobs, "find_spec", lambda _: True)
    for _ in range(2):
        assert not picked_logprobs._is_made(torch.device("cpu"))
    picked_logprobs._is_made.cache_clear()
    [line] = caplog.messages
    assert f"Triton cannot make the kernel for them ({type(error).__name__}: {error})" in line


def test_memory_that_runs_out_is_no_missing_compiler(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernels = SimpleNamespace(forward=fail, backward=fail)
    monkeypatch.setitem(sys.modules, "lachesis.pipeline.model.picked_kernels", kernels)
    monkeypatch.setattr(picked_logprobs, "find_spec", lambda _: True)
    with pytest.raises(torch.OutOfMemoryError):
        picked_logprobs._is_made(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocabulary", [37, 8192, 49152, 151936])
def test_a_gpus_kernel_is_near_float64_and_repeats_its_bits(vocabulary, temperature, dtype):
    assert has_kernel(torch.device("cuda"))
    case = given(vocabulary, dtype, "cuda")
    logprobs, entropies, gradients = by_row(*case, temperature)
    expected = by_softmax(*case, temperature, torch.float64)
    assert (logprobs - expected[0]).abs().max() < 1e-5
    assert (entropies - expected[1]).abs().max() < 1e-5
    apart = (gradients.double() - expected[2].double()).norm() / expected[2].double().norm()
    assert apart < (1e-5 if dtype == torch.float32 else 1e-4)
    for first, again in zip((logprobs, entropies, gradients), by_row(*case, temperature), strict=True):
        assert torch.equal(first, again)


@pytest.mark.gpu
def test_a_gpus_kernel_takes_logits_that_are_no_number_or_excluded():
    logits, targets, _ = given(20_000, torch.float32, "cuda")
    logits[1, : 3 * 4096] = -torch.inf  # more than a block
    logits[3, 2] = torch.nan
    targets[1] = 19_000
    logprobs, entropies = pick_logprobs(logits, targets, 1.0)
    expected = by_softmax(logits, targets, torch.ones(ROWS, device="cuda"), 1.0, torch.float64)
    assert logprobs.isnan().nonzero().tolist() == entropies.isnan().nonzero().tolist() == [[3]]
    assert (logprobs - expected[0]).nan_to_num().abs().max() < 1e-5
