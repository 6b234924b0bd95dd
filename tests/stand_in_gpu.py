"""A stand-in for a GPU: a device of torch whose tensors are in main memory, and mix with none that is elsewhere.

It raises what torch raises for tensors on two devices, so code that forgets to move one fails here as on a GPU. It
shows nothing else of a GPU: no kernels of its own, nothing asynchronous, no memory that runs out. Models need eager
attention: torch chooses fused kernels by the device. What imports it is skipped
where torch has no devices in Python, and on a machine with a GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import pytest
import torch
from hidden_gpu import machine_has_gpu
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["DEVICE", "OnStandIn", "move", "stand_in"]

_NAME = "standin"
if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip(f"torch {torch.__version__} has no devices in Python", allow_module_level=True)
if machine_has_gpu():
    pytest.skip("torch takes the stand-in for its one accelerator, beside a real one", allow_module_level=True)
backend_registration._setup_privateuseone_for_python_backend(_NAME)
torch.get_device_module(_NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
DEVICE = torch.device(_NAME, 0)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
"""What may read one device and write another."""


class OnStandIn(torch.Tensor):
    """A tensor on the stand-in; `held`, in main memory, has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnStandIn({self.held!r})"

    def data_ptr(self) -> int:
        """Return where the values lie: tied weights have the same one."""
        return self.held.data_ptr()

    def item(self) -> Any:
        """Return the one value there is."""
        return self.held.item()

    def tolist(self) -> Any:
        """Return the values."""
        return self.held.tolist()

    def __float__(self) -> float:
        return float(self.held)

    def __int__(self) -> int:
        return int(self.held)

    def __bool__(self) -> bool:
        return bool(self.held)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        given = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        elsewhere = [leaf for leaf in tensors if not isinstance(leaf, cls) and leaf.dim()]
        if elsewhere and func not in _COPIES:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and "
                f"{elsewhere[0].device}! ({func})"
            )
        wanted = torch.device(given.pop("device", None) or DEVICE)
        found = func(*_unwrapped(args), **_unwrapped(given))
        if func.__name__.partition(".")[0].endswith("_"):  # in place
            return args[0]
        return found if wanted.type == "cpu" else tree_map(_wrapped, found)


def move(model: torch.nn.Module) -> None:
    """Move a model to the stand-in: as `model.to(DEVICE)`, which knows no such parameters. Tied ones stay tied."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the second keeps the id from being another's
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or isinstance(tensor, OnStandIn):
                    continue
                if id(tensor) not in moved:
                    values: torch.Tensor = OnStandIn(tensor.detach().clone())
                    if isinstance(tensor, torch.nn.Parameter):
                        values = torch.nn.Parameter(values, requires_grad=tensor.requires_grad)
                    moved[id(tensor)] = values, tensor
                held[name] = moved[id(tensor)][0]


def stand_in(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the same values on the stand-in."""
    return {name: OnStandIn(tensor.detach().clone()) for name, tensor in tensors.items()}


def _unwrapped(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.held if isinstance(leaf, OnStandIn) else leaf, tree)


def _wrapped(leaf: Any) -> Any:
    return OnStandIn(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> OnStandIn:
    return OnStandIn(torch.empty(size, dtype=dtype))


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> OnStandIn:
    return OnStandIn(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    del non_blocking
    _unwrapped(target).copy_(_unwrapped(source))
    return target


_kernels = torch.library.Library("aten", "IMPL")
for _operator, _kernel in (
    ("empty.memory_format", _empty),
    ("empty_strided", _empty_strided),
    ("_copy_from", _copy_from),
):
    _kernels.impl(_operator, _kernel, "PrivateUse1")
