"""Weights out and in, beside plain copies of the same bytes: what a trainer writes, and what a server loads."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu.figures import check, figure
from gpu.models import DEVICE, model_of, synchronize
from safetensors.torch import load_file, save_file

from lachesis.pipeline.model.device import prepare_device
from lachesis.pipeline.model.host_memory import HostCopies
from lachesis.pipeline.model.tensors import load_tensors, policy_tensors, policy_version, rounded, weights_digest
from lachesis.pipeline.model.weight_files import read_weights, write_new_weights
from lachesis.schemas.ids import PolicyVersion

__all__ = ["measure"]

_ROUNDS = {"0.135B": 7, "1.5B": 3}
_BESIDE = [
    ("stop", "copied"),
    ("written", "plain save_file"),
    ("out", "plain save_file"),
    ("out", "copied anew"),
    ("read", "copied anew"),
    ("in", "copied anew"),
    ("in", "copied over"),
]
"""What is given in units of something else, of the same round."""


def measure(*, small: bool) -> None:
    """Measure with the threads that a trainer has by default: the median of some rounds, all taking turns."""
    prepare_device(DEVICE, 1)
    for shape in ("0.135B",) if small else ("1.5B", "0.135B"):
        model, served = model_of(shape, DEVICE), model_of(shape, "cpu")
        tensors = policy_tensors(model)
        with tempfile.TemporaryDirectory(prefix="lachesis weights ") as folder:
            for dtype in ("bfloat16",) if small else ("bfloat16", "float32"):
                (Path(folder) / dtype).mkdir()
                _round_trips(f"{shape} {dtype}", tensors, served, Path(folder) / dtype, dtype)
        same = weights_digest(policy_tensors(served)) == weights_digest(
            {name: rounded({name: tensor}, "bfloat16")[name].to(tensor.dtype) for name, tensor in tensors.items()}
        )
        check(f"{shape}: a server has the weights that the trainer sent", same)


def _round_trips(name: str, tensors: dict[str, torch.Tensor], served: Any, folder: Path, dtype: str) -> None:
    sent, copies = rounded(tensors, dtype), HostCopies()
    host = copies.copy(tensors, dtype)
    warm = {key: torch.zeros_like(tensor) for key, tensor in host.items()}
    over = warm if DEVICE == "cpu" else {key: torch.zeros_like(tensor) for key, tensor in host.items()}
    plain, file = folder / "plain.safetensors", (PolicyVersion(0, "gpu", ""), folder)
    loaded: dict[str, torch.Tensor] = {}

    def write() -> None:
        nonlocal file
        file = write_new_weights(host, folder, 1, "gpu", dtype)

    def read() -> None:
        nonlocal loaded
        loaded = read_weights(file[1], file[0], policy_tensors(served))

    calls: dict[str, Callable[[], Any]] = {
        "rounded": lambda: rounded(tensors, dtype),
        "copied": lambda: [warm[key].copy_(tensor) for key, tensor in sent.items()],
        "copied anew": lambda: [tensor.clone() for tensor in host.values()],
        "copied over": lambda: [over[key].copy_(tensor) for key, tensor in host.items()],
        "stop": lambda: copies.copy(tensors, dtype),
        "digest": lambda: policy_version(1, "gpu", host),
        "plain save_file": lambda: save_file(host, plain),
        "written": write,
        "plain load_file": lambda: load_file(plain),
        "read": read,
        "loaded": lambda: load_tensors(served, loaded),
    }
    took: dict[str, list[float]] = {what: [] for what in calls}
    for _ in range(_ROUNDS[name.split(maxsplit=1)[0]]):
        for what, call in calls.items():
            took[what].append(_seconds(call))
    billions = sum(tensor.numel() for tensor in tensors.values()) / 1e9
    for what, seconds in took.items():
        _figure(f"{name} {what}", [one / billions for one in seconds], "s a billion")
    for whole, parts in (("out", ("stop", "written")), ("in", ("read", "loaded"))):
        took[whole] = [sum(each) for each in zip(*(took[part] for part in parts), strict=True)]
    for what, other in _BESIDE:
        ratios = [one / base for one, base in zip(took[what], took[other], strict=True)]
        _figure(f"{name} {what} / {other}", ratios, "times")


def _seconds(call: Callable[[], Any]) -> float:
    synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - began


def _figure(name: str, values: list[float], unit: str) -> None:
    least, most = (float(f"{value:.4g}") for value in (min(values), max(values)))
    figure(name, statistics.median(values), unit, least=least, most=most)
