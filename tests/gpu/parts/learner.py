"""The learner's speed and memory beside those of the loop that a user would write."""

from typing import Any

import torch
from gpu.figures import figure
from gpu.models import DEVICE, THREADS, batch_of, config_of, free_memory, mean_seconds, model_of, peak_gb, seconds_of
from transformers import AutoModelForCausalLM

from lachesis.pipeline.errors import OutOfMemoryError
from lachesis.pipeline.model.device import prepare_device
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import PackedBatch

__all__ = ["measure"]

_CASES = {
    "0.135B": (64, 1024, ("defaults", "plain kernels", "no step KL", "recompute", "not deterministic")),
    "0.5B": (64, 1024, ("defaults",)),
    "1.5B": (32, 1024, ("defaults", "recompute")),
    "tiny": (8, 128, ("defaults", "plain kernels", "no step KL", "recompute")),
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "plain kernels": {"device_kernels": False},
    "compiled": {"compile": True},
    "no step KL": {"max_step_kl": None},
    "uneven, in one": {"packing": True},
    "uneven, padded": {"packing": False},
    "recompute": {"recompute_layers": True},
    "not deterministic": {},
}
_STEPS_BEFORE = 30
"""The first steps of a run are all measured for their size, later ones in turn."""


def measure(*, small: bool) -> None:
    """Measure each model in each way, and after it the bare loop on the same batch."""
    peak = _peak() if DEVICE == "cuda" else None
    if not small:  # what was measured never, first; its first steps may take a minute
        rows, length, _ = _CASES["0.135B"]
        batch = batch_of(config_of("0.135B").vocab_size, rows, length)
        for way in ("defaults", "compiled"):
            _learner("0.135B", batch, way)
    for shape in ("tiny",) if small else ("0.135B", "0.5B", "1.5B"):
        rows, length, ways = _CASES[shape]
        batch = batch_of(config_of(shape).vocab_size, rows, length)
        rates = {way: _learner(shape, batch, way) for way in ways}
        bare = _bare(shape, batch)
        best = rates["defaults"]
        if bare and best:
            figure(f"{shape} defaults beside the bare loop", best / bare, "of its speed")
        if peak and best:
            figure(f"{shape} defaults beside this card's product", best * _flops_a_token(shape, length) / peak, "of it")
        if shape in {"tiny", "0.135B"}:
            _uneven(shape, rows, length)


def _uneven(shape: str, rows: int, length: int) -> None:
    """Measure rows in one beside padded ones, at lengths that differ."""
    batch = batch_of(config_of(shape).vocab_size, 4 * rows, length, uneven=True)
    in_one, padded = (_learner(shape, batch, way) for way in ("uneven, in one", "uneven, padded"))
    if in_one and padded:
        figure(f"{shape} uneven rows in one beside padded ones", in_one / padded, "of their speed")


def _peak() -> float:
    """Measure what this card can do: a product of matrices in bfloat16, in operations a second, and a copy."""
    one = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    found = 2 * 8192**3 / seconds_of(lambda: one @ one, 10)
    figure("bfloat16 product of 8192^3", found / 1e12, "TFLOP/s")
    other = torch.empty_like(one)
    figure("copy on the device", 2 * one.nbytes / seconds_of(lambda: other.copy_(one), 10) / 1e12, "TB/s")
    return found


def _learner(shape: str, batch: PackedBatch, way: str) -> float | None:
    """Return tokens a second; None where it does not fit, or this learner has no such setting."""
    prepare_device(DEVICE, THREADS, deterministic="never" if way == "not deterministic" else "auto")
    if not _SETTINGS[way].keys() <= set(LearnerConfig.__struct_fields__):
        return None
    free_memory()
    model = model_of(shape, DEVICE)
    name = f"{shape} {way}"
    try:
        settings = LearnerConfig(learning_rate=1e-6, warmup_steps=0, **_SETTINGS[way])
        learner = Learner(model, settings, steps=_STEPS_BEFORE)
        learner.step(batch)
        seconds = mean_seconds(lambda: learner.step(batch), settings.step_kl_every)
    except OutOfMemoryError as error:
        figure(name, None, "tokens/s", why=f"out of memory: {str(error)[:90]}")
        return None
    tokens, length = int(batch.lengths_B.sum()), batch.tokens_BT.shape[1]
    figure(name, tokens / seconds, "tokens/s", microbatch_tokens=learner.fit.tokens, recomputes=learner.fit.recomputes)
    if not name.startswith(f"{shape} uneven"):
        figure(f"{name}, share of what is computed", tokens * _flops_a_token(shape, length) / seconds / 1e12, "TFLOP/s")
    if (peak := peak_gb()) is not None:
        figure(f"{name}, memory", peak, "GB")
    return tokens / seconds


def _flops_a_token(shape: str, length: int) -> float:
    """Return the operations of a step for a token: six a parameter, and attention's."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return 6 * parameters + 6 * model.config.num_hidden_layers * model.config.hidden_size * length


def _bare(shape: str, batch: PackedBatch) -> float | None:
    """Return tokens a second of autocast, whole logits of a micro-batch and fused AdamW."""
    torch.use_deterministic_algorithms(mode=False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    found = None
    for micro in (16384, 8192):
        free_memory()
        model = model_of(shape, DEVICE)
        try:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=DEVICE == "cuda")
            _bare_step(model, optimizer, batch, micro)
            seconds = mean_seconds(lambda m=model, o=optimizer, n=micro: _bare_step(m, o, batch, n), 3)  # type: ignore[misc]
        except torch.OutOfMemoryError:
            figure(f"{shape} bare loop, micro-batches of {micro}", None, "tokens/s", why="out of memory")
            continue
        rate = int(batch.lengths_B.sum()) / seconds
        figure(f"{shape} bare loop, micro-batches of {micro}", rate, "tokens/s")
        if (peak := peak_gb()) is not None:
            figure(f"{shape} bare loop, micro-batches of {micro}, memory", peak, "GB")
        found = max(rate, found or 0.0)
        if shape == "tiny":
            break
    return found


def _bare_step(model: Any, optimizer: torch.optim.Optimizer, batch: PackedBatch, micro: int) -> None:
    device = torch.device(DEVICE)
    for _, part in batch.microbatches(micro):
        given = part.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(given.tokens_BT[:, :-1]).logits
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, given.tokens_BT[:, 1:, None].long())[..., 0]
        ratio = (logprobs - given.logprobs_BT[:, 1:]).exp()
        terms = (ratio * given.advantages_BT[:, 1:])[given.mask_BT[:, 1:]]
        (-terms.sum() / batch.trainable_tokens).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
