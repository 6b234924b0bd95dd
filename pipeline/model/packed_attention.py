"""Attention over rows that lie one behind the other: each token sees only tokens of its own row.

transformers allows an attention function and a mask function to be registered under a name. The functions here copy
queries, keys and values into grids of rows of like length, call the model's own attention on the grids, and copy its
output back, so a model computes the same as on padded rows. Without packed rows they call the model's own functions
directly. Masks follow the model's rules (a window, chunks), by a token's place in its own row.

Copies into grids and back are lookups by index in both directions, so they give the same bits twice on any device. A
token that several rows share is copied into the grid of each, and the gradients of its copies are summed in order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from lachesis.pipeline.errors import UnsupportedError
from lachesis.pipeline.model.packed_rows import Grid, PackedRows

__all__ = ["attends_by", "install_packed_attention", "packed_pass"]

_KINDS = ("sdpa", "eager")
_PREFIX = "lachesis_packed_"
_current: ContextVar[PackedRows | None] = ContextVar("packed_rows", default=None)


@dataclass(frozen=True, slots=True, eq=False)
class _PackedMask:
    """What stands in for the mask of a pass over packed rows; `of_grids`: bool [b,1,t,t], None: causal alone."""

    rows: PackedRows
    of_grids: tuple[torch.Tensor | None, ...]


@contextmanager
def packed_pass(rows: PackedRows | None) -> Iterator[None]:
    """Let the forward pass within be one over packed rows; None: over ordinary ones.

    A backward pass may be outside, layers that it computes again included.
    """
    token = _current.set(rows)
    try:
        yield
    finally:
        _current.reset(token)


def attends_by(model: Any) -> str:
    """Return the name of the model's attention, whether or not it can be packed by now."""
    name: str = model.config.get_text_config()._attn_implementation  # noqa: SLF001 - where transformers keeps it
    return name.removeprefix(_PREFIX)


def install_packed_attention(model: Any, *, on: bool) -> None:
    """Let the model's attention take packed rows too, or make it what it was. Raises `UnsupportedError`."""
    kind = attends_by(model)
    if kind not in _KINDS:
        if on:
            raise UnsupportedError(f"its attention is {kind}, not {' or '.join(_KINDS)}")
        return
    wanted = _PREFIX + kind if on else kind
    if model.config.get_text_config()._attn_implementation != wanted:  # noqa: SLF001
        model.set_attn_implementation(wanted)


class _Moves(NamedTuple):
    """`there`: which row of a tensor is at each place. `back`: which row of the gradient comes back, -1: none.

    `copies`: pairs of further rows of the gradient and of where each is added. An index is in a pair once, so that the
    order of the sum is the same on any device.
    """

    there: torch.Tensor
    back: torch.Tensor
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


class _Rearrange(torch.autograd.Function):
    """Rows of a tensor by index, and their gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dim: int, moves: _Moves) -> torch.Tensor:
        ctx.dim, ctx.copies = dim, moves.copies
        ctx.save_for_backward(moves.back)
        return values.index_select(dim, moves.there)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        found = gradients[0].index_select(ctx.dim, back.clamp(min=0))
        shape = [1] * found.dim()
        shape[ctx.dim] = -1
        found = found.masked_fill((back < 0).view(shape), 0)
        for at, to in ctx.copies:
            summed = found.index_select(ctx.dim, to) + gradients[0].index_select(ctx.dim, at)
            found = found.index_copy(ctx.dim, to, summed)
        return found, None, None


def _attend(kind: str, module: Any, *given: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as `sdpa_attention_forward` does, which takes query, key and value, then the mask."""
    columns, attention_mask = given[:3], given[3] if len(given) > 3 else kwargs.pop("attention_mask")
    own = sdpa_attention_forward if kind == "sdpa" else _eager_of(module)
    if not isinstance(attention_mask, _PackedMask):
        if _current.get() is not None:
            raise UnsupportedError(f"{type(module).__name__} makes no mask by which rows could be kept apart")
        found: tuple[torch.Tensor, torch.Tensor | None] = own(module, *columns, attention_mask, **kwargs)
        return found
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError(f"{type(module).__name__} has a bias by position")
    kwargs.pop("is_causal", None)
    return _attend_packed(kind, own, module, columns, attention_mask, **kwargs), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the shapes of grids are others in each micro-batch
def _attend_packed(
    kind: str,
    own: Callable[..., Any],
    module: Any,
    columns: tuple[torch.Tensor, ...],
    mask: _PackedMask,
    **kwargs: Any,
) -> torch.Tensor:
    rows = mask.rows
    if columns[0].shape[2] != rows.tokens:
        raise UnsupportedError(f"{type(module).__name__} sees {columns[0].shape[2]} tokens of {rows.tokens}")
    into_grids = _Moves(rows.spread_G, rows.back_N, rows.copies)
    spread = [_rearranged(column, 2, into_grids)[0] for column in columns]  # [H,G,D]
    outputs = []
    for grid, of_grid in zip(rows.grids, mask.of_grids, strict=True):
        parts = [_rows_of(column, grid) for column in spread]
        if kind == "sdpa":
            output = own(module, *parts, of_grid, is_causal=of_grid is None, **kwargs)[0]
        else:
            output = own(module, *parts, _additive(of_grid, grid, parts[0]), **kwargs)[0]
        outputs.append(output.flatten(0, 1))  # [b*t,H,D]
    return _rearranged(torch.cat(outputs), 0, _Moves(rows.back_N, rows.token_G))[None]


def _rows_of(column_HGD: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return [b,H,t,D]."""
    heads, _, size = column_HGD.shape
    return column_HGD[:, grid.places].reshape(heads, grid.rows, grid.width, size).transpose(0, 1)


def _rearranged(values: torch.Tensor, dim: int, moves: _Moves) -> torch.Tensor:
    found: torch.Tensor = _Rearrange.apply(values, dim, moves)  # type: ignore[no-untyped-call]
    return found


def _additive(of_grid: torch.Tensor | None, grid: Grid, like: torch.Tensor) -> torch.Tensor:
    """Return a mask as it is added to scores."""
    if of_grid is None:
        of_grid = torch.ones(grid.width, grid.width, dtype=torch.bool, device=like.device).tril()[None, None]
    return torch.zeros((), dtype=like.dtype, device=like.device).masked_fill(~of_grid, torch.finfo(like.dtype).min)


def _eager_of(module: Any) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise UnsupportedError(f"{type(module).__name__} has no attention of its own that could be called on rows")
    return found


def _mask(kind: str, **given: Any) -> Any:
    rows = _current.get()
    if rows is None:
        return (sdpa_mask if kind == "sdpa" else eager_mask)(**given)
    if given.get("use_vmap") or given.get("attention_mask") is not None or given["q_length"] != rows.tokens:
        raise UnsupportedError("its masks are more than causal, windows and chunks")
    if given["kv_length"] != rows.tokens or given.get("q_offset") or given.get("kv_offset"):
        raise UnsupportedError("its passes see more tokens than those given")
    size, allows = given.get("local_size"), given["mask_function"]
    return _PackedMask(rows, tuple(_of_grid(rows, grid, size, allows) for grid in rows.grids))


def _of_grid(
    rows: PackedRows, grid: Grid, size: int | None, allows: Callable[..., torch.Tensor]
) -> torch.Tensor | None:
    """Return which token of a row may see which, bool [b,1,t,t]; None: all before it."""
    if size is None or size >= grid.width:
        return None
    if rows.copies:
        raise UnsupportedError("its windows or chunks take one place for each token, and shared tokens have several")
    at_bt = rows.spread_G[grid.places].view(grid.rows, grid.width)
    real_bt = rows.real_G[grid.places].view(grid.rows, grid.width)
    none = torch.zeros((), dtype=torch.int64, device=at_bt.device)
    return allows(none, none, at_bt[:, None, :, None], at_bt[:, None, None, :]) & real_bt[:, None, None, :]


for _kind in _KINDS:
    AttentionInterface.register(_PREFIX + _kind, partial(_attend, _kind))
    AttentionMaskInterface.register(_PREFIX + _kind, partial(_mask, _kind))
