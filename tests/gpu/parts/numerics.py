"""Arithmetic: two steps in float32 on the CPU, in float32 and bfloat16 on the GPU, and the same bits twice."""

from typing import NamedTuple

import torch
from gpu.figures import check, figure, left_out
from gpu.models import DEVICE, THREADS, batch_of, free_memory, model_of

from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.device import prepare_device
from lachesis.pipeline.model.logprobs import SampledLogprobs
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.schemas.errors import DataError

__all__ = ["measure"]


class _Outcome(NamedTuple):
    """Logprobs before the steps, and what the steps added to the weights."""

    logprobs: torch.Tensor
    moved: torch.Tensor


def measure(*, small: bool) -> None:
    """Compare each way to compute with float32 on the CPU, which is the one that tests check."""
    size = ("tiny", 4, 64) if small else ("0.135B", 8, 256)
    expected = _two_steps(size, "cpu", "float32")
    ways = [("bfloat16", "cpu", "bfloat16")] if DEVICE == "cpu" else []
    ways += [("float32", "cuda", "float32"), ("bfloat16", "cuda", "bfloat16")] if DEVICE == "cuda" else []
    bounds = {"float32": 1e-4, "bfloat16": 0.05}
    for name, device, precision in ways:
        found = _two_steps(size, device, precision)
        apart = (found.logprobs - expected.logprobs).abs()
        moved = float((found.moved - expected.moved).norm() / expected.moved.norm())
        figure(f"{name} logprobs apart, mean", float(apart.mean()), "nats")
        figure(f"{name} logprobs apart, most", float(apart.max()), "nats")
        figure(f"{name} weights moved apart", moved, "of the way")
        check(f"{name} is near float32 on the CPU", float(apart.mean()) < bounds[precision], f"mean {apart.mean():.2g}")
        again = _two_steps(size, device, precision)
        same = bool((again.moved == found.moved).all())
        check(f"{name} gives the same bits twice", same, f"torch {torch.__version__}")
    if DEVICE == "cpu":
        left_out("float32 and bfloat16 on the GPU", "torch sees no GPU")
    _large_steps("tiny" if small else "0.135B")
    _adapters("tiny" if small else "1.5B", rows=4 if small else 16, length=64 if small else 512)


def _two_steps(size: tuple[str, int, int], device: str, precision: str) -> _Outcome:
    shape, rows, length = size
    prepare_device(device, THREADS)
    model = model_of(shape, device, sharpened=3.0)
    vocabulary = model.config.vocab_size
    before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    first = batch_of(vocabulary, rows, length)
    given = first.to(torch.device(device))
    with torch.no_grad():
        computed = SampledLogprobs(model, getattr(torch, precision))(given.tokens_BT, 1.0, given.mask_BT)[0]
    learner = Learner(model, LearnerConfig(precision=precision, warmup_steps=0, learning_rate=2e-5))  # type: ignore[arg-type]
    for seed in range(2):
        learner.step(batch_of(vocabulary, rows, length, seed))
    moved = [(after.detach().cpu() - old).flatten() for after, old in zip(model.parameters(), before, strict=True)]
    del learner, model
    free_memory()
    return _Outcome(computed.cpu().float()[first.mask_BT], torch.cat(moved))


def _large_steps(shape: str) -> None:
    """Steps that are too large: one is shortened, one refused, which leaves the weights as they were."""
    prepare_device(DEVICE, THREADS)
    for how in ("shorten", "refuse"):
        model = model_of(shape, DEVICE)
        settings = LearnerConfig(warmup_steps=0, learning_rate=3e-3, on_large_step=how, max_step_kl=0.05)  # type: ignore[arg-type]
        if shape == "tiny":
            settings = LearnerConfig(warmup_steps=0, learning_rate=3e-1, on_large_step=how, max_step_kl=0.05)  # type: ignore[arg-type]
        learner = Learner(model, settings)
        batch = batch_of(model.config.vocab_size, 8, 128)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        try:
            step = learner.step(batch)
        except DataError as error:
            same = all(bool((old == now).all()) for old, now in zip(before, model.parameters(), strict=True))
            check("a refused step leaves the weights bit for bit", how == "refuse" and same, str(error)[:80])
        else:
            taken = step.step_share < 1 and step.step_kl is not None and step.step_kl <= 0.05
            check("a step that is too large is shortened", how == "shorten" and taken, f"{step.step_share:g} of it")
        del learner, model
        free_memory()


def _adapters(shape: str, rows: int, length: int) -> None:
    """Adapters with a reference term."""
    try:
        from lachesis.pipeline.trainer.adapters import with_adapters

        model = with_adapters(model_of(shape, DEVICE), LoraConfig(), 0).to(DEVICE)
    except ImportError as error:
        left_out("adapters", str(error))
        return
    learner = Learner(model, LearnerConfig(warmup_steps=0, loss=LossConfig(kl_coef=0.01)))
    steps = [learner.step(batch_of(model.config.vocab_size, rows, length)) for _ in range(3)]
    references = [step.reference_kl or 0.0 for step in steps]
    check("adapters leave the reference as they learn", references[0] < 1e-6 < references[-1], f"{references}")
    figure(f"adapters at {shape}, {rows * length} tokens", min(step.seconds for step in steps), "s a step")
