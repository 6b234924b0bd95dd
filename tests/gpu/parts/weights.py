"""Weights out and in, beside plain copies of the same bytes: what a trainer writes, and what a server loads."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu.figures import check, figure
from gpu.models import DEVICE, model_of, seconds_of, synchronize
from safetensors.torch import load_file, save_file

from lachesis.pipeline.model.device import prepare_device
from lachesis.pipeline.model.tensors import load_tensors, policy_tensors, policy_version, rounded, weights_digest
from lachesis.pipeline.model.weight_files import read_weights, write_weights

__all__ = ["measure"]


def measure(*, small: bool) -> None:
    """Measure with the threads that a trainer has by default, in seconds a billion parameters."""
    prepare_device(DEVICE, 1)
    for shape in ("0.135B",) if small else ("0.135B", "1.5B"):
        model, served = model_of(shape, DEVICE), model_of(shape, "cpu")
        tensors = policy_tensors(model)
        billions = sum(tensor.numel() for tensor in tensors.values()) / 1e9
        seconds = seconds_of(lambda given=tensors: rounded(given, "bfloat16"))
        figure(f"{shape} rounded to bfloat16", seconds / billions, "s a billion")
        with tempfile.TemporaryDirectory(prefix="lachesis weights ") as folder:
            for dtype in ("bfloat16",) if small else ("float32", "bfloat16"):
                sent = rounded(tensors, dtype)
                _round_trip(f"{shape} {dtype}", sent, served, Path(folder) / dtype, billions=billions, dtype=dtype)
        same = weights_digest(policy_tensors(served)) == weights_digest(
            {name: rounded({name: tensor}, "bfloat16")[name].to(tensor.dtype) for name, tensor in tensors.items()}
        )
        check(f"{shape}: a server has the weights that the trainer sent", same)


def _round_trip(
    name: str, sent: dict[str, torch.Tensor], served: Any, folder: Path, *, billions: float, dtype: str
) -> None:
    folder.mkdir()
    plain = folder / "plain.safetensors"

    def take(what: str, call: Callable[[], Any]) -> Any:
        synchronize()
        began = time.perf_counter()
        found = call()
        synchronize()
        figure(f"{name} {what}", (time.perf_counter() - began) / billions, "s a billion")
        return found

    copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in sent.items()}
    figure(f"{name} copied", seconds_of(lambda: _copy(sent, copies)) / billions, "s a billion")
    take("plain save_file", lambda: save_file({key: value.clone() for key, value in copies.items()}, plain))
    version = take("digest", lambda: policy_version(1, "gpu", sent))
    path = take("written", lambda: write_weights(sent, folder, version, dtype))
    take("plain load_file", lambda: load_file(plain))
    loaded = take("read", lambda: read_weights(path, version, policy_tensors(served)))
    take("loaded", lambda: load_tensors(served, loaded))


def _copy(sent: dict[str, torch.Tensor], copies: dict[str, torch.Tensor]) -> None:
    for name, tensor in sent.items():
        copies[name].copy_(tensor)
