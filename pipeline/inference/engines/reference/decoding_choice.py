"""Finds the fastest way to decode that gives the same logits as a model's plain forward pass.

Families differ in caches, masks and positions, and a wrong one raises nothing: it gives other logits. So each way is
tried on the model itself before the first request (`DecodingTrial`). If a model's cached pass is known to leave out a
part of its plain pass, the model is decoded without a cache, whatever a trial finds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lachesis.pipeline.inference.engines.reference.decoding import (
    DecodingBatch,
    PaddedBatch,
    SeparateRows,
    UnpaddedBatch,
    WholeSequences,
)
from lachesis.pipeline.inference.engines.reference.decoding_trial import DecodingTrial
from lachesis.pipeline.inference.engines.reference.graphed_call import GraphPool
from lachesis.pipeline.inference.engines.reference.row_cache import keeps_states, new_cache
from lachesis.pipeline.inference.engines.reference.static_batch import StaticBatch
from lachesis.pipeline.model.context import positions_change_at
from lachesis.schemas.errors import ConfigError

__all__ = ["choose_decoding"]

log = logging.getLogger("lachesis")


def choose_decoding(model: Any, max_model_len: int) -> DecodingBatch:
    """Return an empty batch that decodes `model`. Raises `ConfigError` that says why there is none."""
    name, failures = type(model).__name__, []
    graphs = graph_pool(next(model.parameters()).device)
    changes_at = positions_change_at(model.config, max_model_len)
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        trial = DecodingTrial(model, max_model_len, by_prefix=changes_at is not None)
        if changes_at is None:
            try:
                trial.check_causal()
            except ConfigError:
                raise
            except Exception as error:  # models raise whatever their configuration leads them into
                text = f"{name} cannot be sampled: a plain pass fails by {type(error).__name__}: {error}"
                raise ConfigError(text) from error
        if (inexact := _inexact_cache(model)) is not None:
            failures.append(inexact)
        for make in [lambda: WholeSequences(model)] if inexact is not None else _ways(model, changes_at, graphs):
            try:
                batch = make()
                problem = trial.problem(batch)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - models raise whatever a cache or mask of another kind runs into
                problem = f"{type(error).__name__}: {error}"
            if problem is None:
                batch.clear()
                if graphs is not None:
                    graphs.strict = False  # a size that comes later may find no memory
                batch.about += f" ({failures[-1]})" if failures else ""
                batch.about += "" if trial.left_out is None else f"; {trial.left_out}"
                if failures or type(batch) is not PaddedBatch or trial.left_out is not None:
                    log.info("%s is decoded %s", name, batch.about)
                return batch
            failures.append(problem[:200])
    raise ConfigError(f"{name} cannot be sampled by the reference server. Tried: {'; '.join(failures)}")


def graph_pool(device: torch.device) -> GraphPool | None:
    """Return the pool of graphs on a GPU, else None. A step that cannot be recorded fails its trial."""
    return GraphPool(device, strict=True) if device.type == "cuda" else None


def _ways(model: Any, changes_at: int | None, graphs: GraphPool | None) -> Iterator[Callable[[], DecodingBatch]]:
    if changes_at is None:
        if not _has_states(model):  # families mask padding out of their states, but not all of them do it exactly
            if graphs is not None:
                yield lambda: StaticBatch(model, graphs)
            yield lambda: PaddedBatch(model)
        yield lambda: UnpaddedBatch(model)
        yield lambda: SeparateRows(model)
    else:
        yield lambda: SeparateRows(model, rereads_at=changes_at + 1)
    yield lambda: WholeSequences(model)


def _inexact_cache(model: Any) -> str | None:
    """Return what the cached pass of a model leaves out, None if no difference is known.

    Mamba 2 layers of transformers hold their time steps within `time_step_limit` in a plain pass and in no cached one,
    so the two differ at every token whose time step lies outside; a few tokens need not show that.
    """
    for module in model.modules():
        limit = getattr(module, "time_step_limit", None)
        if limit is not None and (limit[0] > 0 or limit[1] < float("inf")):
            return f"its cached pass leaves out the limit of time steps, {limit[0]:g} to {limit[1]:g}"
    return None


def _has_states(model: Any) -> bool:
    try:
        return keeps_states(new_cache(model))
    except Exception:  # noqa: BLE001 - as in `choose_decoding`: this cache is not made here, so it is tried and fails
        return False
