"""A stand-in for a GPU: tensors in main memory that say they are on one, and mix with none that is elsewhere.

It raises what torch raises for tensors on two devices. It shows nothing else of a GPU: no kernels of its own, nothing
asynchronous, no memory that runs out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["OnStandIn", "stand_in"]

DEVICE = torch.device("cuda:0")
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
"""What may read one device and write another."""


class OnStandIn(torch.Tensor):
    """A tensor that `held` has the values of."""

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
        """Return where the values lie: tied weights are told by it."""
        return self.held.data_ptr()

    def item(self) -> Any:
        """Return the one value there is."""
        return self.held.item()

    def __float__(self) -> float:
        return float(self.held)

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
        if func is torch.ops.aten.copy_.default or func.__name__.split(".")[0].endswith("_"):
            return args[0]
        return found if wanted.type == "cpu" else tree_map(_wrapped, found)


def stand_in(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the same values on the stand-in."""
    return {name: OnStandIn(tensor.detach().clone()) for name, tensor in tensors.items()}


def _unwrapped(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.held if isinstance(leaf, OnStandIn) else leaf, tree)


def _wrapped(leaf: Any) -> Any:
    return OnStandIn(leaf) if isinstance(leaf, torch.Tensor) else leaf
