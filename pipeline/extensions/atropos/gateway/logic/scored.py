"""Converts a rollout group of a batch to ScoredData, as an Atropos trainer reads it. Pure.

Guarantees that scores and advantages are those that the pipeline computed, and that a sample it leaves out says so.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.common.token_credit import token_credit
from lachesis.pipeline.extensions.atropos.logic.scored_groups import PROMPT
from lachesis.schemas.columns import Column, view
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import GroupRef
from lachesis.schemas.rollout import Message, RolloutGroup

__all__ = ["to_scored"]

_NO_LOGPROB = 1.0
"""The API's value at positions that were not sampled."""


def to_scored(ref: GroupRef, group: RolloutGroup, env_id: int | None) -> dict[str, Any]:
    """Return the group with all keys of the API, `inference_logprobs` only if there are some.

    `scores` are the advantages of the samples: the stock trainer normalizes them within the group and uses nothing
    else. `advantages` are those of each token, 0 off the mask. A sample without one gets the mean of the others and the
    override by which the trainer sets its advantage to 0. Raises `DataError` when no sample has one.
    """
    sequences = group.sequences
    credit_of = token_credit(ref, group)
    used = [
        None if sample in sequences.excluded_samples else advantage for sample, advantage in enumerate(ref.advantages)
    ]
    known = [advantage for advantage in used if advantage is not None]
    if not known:
        raise DataError("no sample has an advantage")
    mean = sum(known) / len(known)
    samples = sequences.sample_index or list(range(len(sequences)))
    mask, cuts = sequences.mask, sequences.cuts().tolist()
    tokens = view(sequences.tokens, "int32", len(mask), "tokens")
    credit = np.zeros(len(mask))
    for (start, end), sample, given in zip(pairwise(cuts), samples, credit_of, strict=True):
        credit[start:end] = 0.0 if used[sample] is None or given is None else given
    columns = sequences.columns
    found: dict[str, Any] = {
        "tokens": _cut(tokens, cuts),
        "masks": _cut(np.where(mask, tokens, PROMPT), cuts),
        "scores": [mean if used[sample] is None else used[sample] for sample in samples],
        "advantages": _cut(np.where(mask, credit, 0.0), cuts),
        "ref_logprobs": _rows(columns.get("ref_logprobs"), group),
        "messages": [[_message(said) for said in group.messages[sample]] for sample in samples]
        if group.messages
        else None,
        "generation_params": group.generation or None,
        "overrides": _overrides(group, [used[sample] is None for sample in samples]),
        "group_overrides": group.metadata.get("group_overrides"),
        "images": group.metadata.get("images"),
        "env_id": env_id,
        **_teacher(group),
    }
    if sequences.logprobs is not None:
        logprobs = view(sequences.logprobs, "float32", len(mask), "logprobs")
        found["inference_logprobs"] = _cut(np.where(mask, logprobs, np.float32(_NO_LOGPROB)), cuts)
    return found


def _cut(values: NDArray[Any], cuts: list[int]) -> list[list[Any]]:
    """Return values [T] or [T, k] as one list for each sequence."""
    return [values[start:end].tolist() for start, end in pairwise(cuts)]


def _overrides(group: RolloutGroup, left_out: list[bool]) -> list[dict[str, Any]] | None:
    given = group.metadata.get("overrides")
    if not any(left_out):
        return given if isinstance(given, list) else None
    rows = given if isinstance(given, list) and len(given) == len(left_out) else [{} for _ in left_out]
    return [row | {"set_advantage_to_zero": True} if out else row for row, out in zip(rows, left_out, strict=True)]


def _rows(column: Column | None, group: RolloutGroup) -> list[list[Any]] | None:
    """Return a column's values as [sequence][position], or [sequence][position][k] where it is that wide."""
    if column is None:
        return None
    values = view(column.data, column.dtype, group.sequences.n_tokens, "column", column.width)
    return _cut(values, group.sequences.cuts().tolist())


def _teacher(group: RolloutGroup) -> dict[str, Any]:
    """Return the teacher's alternatives, ragged as the environment sent them: token -1 marks that there is none."""
    columns = group.sequences.columns
    wide = [_rows(columns.get(name), group) for name in ("distill_token_ids", "distill_logprobs")]
    ids, logprobs = wide
    if ids is None or logprobs is None:
        return {"distill_token_ids": None, "distill_logprobs": None}
    kept_ids, kept_logprobs = [], []
    for id_rows, logprob_rows in zip(ids, logprobs, strict=True):
        pairs = [
            [(token, value) for token, value in zip(_listed(row), _listed(values), strict=True) if token >= 0]
            for row, values in zip(id_rows, logprob_rows, strict=True)
        ]
        kept_ids.append([[token for token, _ in row] for row in pairs])
        kept_logprobs.append([[value for _, value in row] for row in pairs])
    return {"distill_token_ids": kept_ids, "distill_logprobs": kept_logprobs}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _message(said: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": said.role, "content": said.content}
    if said.name is not None:
        found["name"] = said.name
    if said.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.tool_calls
        ]
    if said.tool_call_id is not None:
        found["tool_call_id"] = said.tool_call_id
    return found
