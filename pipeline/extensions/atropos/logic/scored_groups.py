"""Converts ScoredData, as an Atropos environment sends it, to a rollout group. Pure.

Guarantees that the group may be stored and trained on as it is: every length and value is checked, missing data is not
invented, and values that the client does not give (weights, finish reasons, item) are marked as assumed in
`metadata[origin.by]`.
"""

from collections.abc import Sequence as Items
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.common.trainability import TrainerLimits, why_untrainable
from lachesis.pipeline.extensions.atropos.logic.scored_data import ScoredData
from lachesis.schemas.columns import Column, as_bytes
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.item_names import check_item_name, name_of_prompt
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences, ToolCall, VersionSpan
from lachesis.schemas.sequences import TEACHER_COLUMN

__all__ = ["PROMPT", "REWARD", "GroupOrigin", "to_group"]

PROMPT = -100
"""Mask of a token that is not trained on."""
REWARD = "environment"
"""Component of the scores, the same as for the pipeline's own environments."""
_ZERO = "set_advantage_to_zero"
"""The override with which a client says that a sample must not be trained on."""
_ITEM = "curriculum_item"
"""The group override with which a client names the item, so that the curriculum learns the result."""
_LOGPROB_SLACK = 1e-4
"""How far above 0 rounding may lift a log-probability, nats."""
_BY_SAMPLE = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "inference_logprobs", "overrides", "images",
    "distill_token_ids", "distill_logprobs", "turn_rewards",
)  # fmt: skip
"""The fields that have an item for each sample, where they are lists."""
_MIN_SAMPLES = 2
"""Samples that a group needs to be compared with each other."""
_ASSUMED = ("policy_versions", "finish_reasons", "started_ns")


class GroupOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a group that its client neither sent nor wrote to a file.

    `longest` is the maximum number of tokens of a sequence, `most` that of sequences of a group. `name` is the client's
    own. `by` says which component received the group: the gateway, or an import. Unless it `needs_logprobs`, the group
    may lack the logprobs that it was sampled with. `limits` are those of the run's trainer: groups that it cannot use
    are refused.
    """

    id: str
    run: str
    env: str
    producer: str
    epoch: int
    counter: int
    policy_version: str
    tokenizer_hash: str
    started_ns: int
    name: str
    longest: int
    most: int
    by: str = "gateway"
    needs_logprobs: bool = True
    limits: TrainerLimits = TrainerLimits(reads=None)


def to_group(data: ScoredData, origin: GroupOrigin) -> RolloutGroup:
    """Return the checked group. Raises `SchemaError`, which says what is wrong and in which sequence.

    Samples whose advantage the client sets to 0 count in the group's statistics, and are not trained on. Those that are
    too long are left out and named in the metadata (`failed_samples`), if at least two others stay.
    """
    data, too_long = _without_too_long(data, origin)
    _check_shape(data, origin)
    _check_temperatures(data, origin)
    lengths = [len(tokens) for tokens in data.tokens]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.fromiter(chain.from_iterable(data.tokens), np.int32)
    labels = np.fromiter(chain.from_iterable(data.masks), np.int32)
    mask = labels != PROMPT
    _check_labels(tokens, labels, offsets)
    mask[offsets[:-1]] = False  # no trainer can train on the first token, because no token comes before it
    named = _item_name(data)
    assumed = [*_ASSUMED, *([] if named else ["item"])]
    group = RolloutGroup(
        id=origin.id,
        run=origin.run,
        env=origin.env,
        item=named or _item_of_prompt(data.tokens[0], mask[: lengths[0]]),
        producer=origin.producer,
        epoch=origin.epoch,
        counter=origin.counter,
        policy_versions=[origin.policy_version],
        sequences=Sequences(
            offsets=as_bytes(offsets, "int32"),
            tokens=as_bytes(tokens, "int32"),
            loss_mask=pack_mask(mask),
            logprobs=_logprobs(data, lengths, mask),
            finish_reasons=["length" if length >= origin.longest else "stop" for length in lengths],
            version_spans=[VersionSpan(i, 0, 0) for i in range(len(lengths))],
            rewards={REWARD: list(data.scores)},
            turn_rewards=data.turn_rewards or None,
            token_advantages=_column("advantages", data.advantages, lengths),
            columns=_columns(data, lengths, tokens, whole=origin.limits.reads is None),
            excluded_samples=_excluded(data),
        ),
        tokenizer_hash=origin.tokenizer_hash,
        started_ns=origin.started_ns,
        messages=[[_message(said) for said in talk] for talk in data.messages or []],
        generation=data.generation_params or {},
        metadata={
            origin.by: {"name": origin.name, "assumed": assumed, **_ignored(data, origin)},
            **_extras(data),
            **({"failed_samples": too_long} if too_long else {}),
        },
    )
    group.check()
    reason = why_untrainable(group, origin.limits)
    if reason is not None:
        raise SchemaError(reason)
    return group


def _without_too_long(data: ScoredData, origin: GroupOrigin) -> tuple[ScoredData, list[dict[str, Any]]]:
    """Return the data without samples that are too long, and why these were left out."""
    n = len(data.tokens)
    kept = [i for i, tokens in enumerate(data.tokens) if len(tokens) <= origin.longest]
    rows = {name: values for name in _BY_SAMPLE if isinstance(values := getattr(data, name), list)}
    if len(kept) == n or len(kept) < _MIN_SAMPLES or any(len(values) != n for values in rows.values()):
        return data, []
    fewer = msgspec.structs.replace(data, **{name: [values[i] for i in kept] for name, values in rows.items()})
    too_long = [
        {"sample": i, "error": _too_long(len(tokens), origin), "text": ""}
        for i, tokens in enumerate(data.tokens)
        if len(tokens) > origin.longest
    ]
    return fewer, too_long


def _too_long(tokens: int, origin: GroupOrigin) -> str:
    return (
        f"{tokens} tokens, where 1 to {origin.longest} are allowed; the most is "
        f"environments.{origin.env}.longest_tokens"
    )


def _check_shape(data: ScoredData, origin: GroupOrigin) -> None:
    n = len(data.tokens)
    if not n:
        raise SchemaError("tokens: the group is empty")
    if n > origin.most:
        raise SchemaError(
            f"tokens: {n} sequences, but a batch has {origin.most} and groups are never split: this group could never "
            "be trained on; make group_size smaller, or batching.batch_size larger"
        )
    if data.images and origin.limits.reads is not None:
        raise SchemaError("images: not taken by the gateway, so the trainer would train without; leave them out")
    if data.inference_logprobs is None and origin.needs_logprobs:
        raise SchemaError(
            "inference_logprobs: missing; the logprobs at which tokens were sampled correct for the age of the policy. "
            "Let the environment collect them (ManagedServer over a vLLM or SGLang server does)"
        )
    for name in ("masks", "scores", "inference_logprobs", "overrides", "messages"):
        values = getattr(data, name)
        if values is not None and len(values) != n:
            raise SchemaError(f"{name}: {len(values)} entries for {n} sequences")
    for i, (tokens, labels) in enumerate(zip(data.tokens, data.masks, strict=True)):
        if not 0 < len(tokens) <= origin.longest:
            raise SchemaError(f"tokens[{i}]: {_too_long(len(tokens), origin)}")
        if len(labels) != len(tokens):
            raise SchemaError(f"masks[{i}]: {len(labels)} entries for {len(tokens)} tokens")


def _check_temperatures(data: ScoredData, origin: GroupOrigin) -> None:
    """Refuse a separate temperature for a sample or the group: the trainer has one for all."""
    if origin.limits.temperature is None:
        return
    named = [(f"overrides[{i}]", given) for i, given in enumerate(data.overrides or [])]
    for name, given in [*named, ("group_overrides", data.group_overrides or {})]:
        temperature = given.get("temperature")
        if temperature is not None and temperature != origin.limits.temperature:
            raise SchemaError(
                f"{name}.temperature: {temperature!r:.40}, but this run's trainer divides all logits by "
                f"training.learner.temperature, {origin.limits.temperature:g}; leave it out, or change that setting"
            )


def _excluded(data: ScoredData) -> list[int]:
    """Return the samples that must not be trained on according to the client."""
    if (data.group_overrides or {}).get(_ZERO):
        return list(range(len(data.tokens)))
    return [i for i, given in enumerate(data.overrides or []) if given.get(_ZERO)]


def _check_labels(tokens: NDArray[np.int32], labels: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
    wrong = np.flatnonzero((labels != PROMPT) & (labels != tokens))
    if len(wrong):
        at = int(wrong[0])
        i = int(np.searchsorted(offsets, at, side="right")) - 1
        raise SchemaError(
            f"masks[{i}][{at - int(offsets[i])}]: {labels[at]}, where only {PROMPT} (not trained on) or the token "
            f"itself, {tokens[at]}, can stand"
        )


def _flat(name: str, rows: Items[Items[float]], lengths: Items[int]) -> NDArray[np.float32]:
    """Return per-token values [T]. Raises `SchemaError` unless there is one for each token."""
    if len(rows) != len(lengths):
        raise SchemaError(f"{name}: {len(rows)} entries for {len(lengths)} sequences")
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if len(row) != length:
            raise SchemaError(f"{name}[{i}]: {len(row)} values for {length} tokens")
    with np.errstate(over="ignore"):  # values that are too large are found below
        found = np.fromiter(chain.from_iterable(rows), np.float32)
    if not np.isfinite(found).all():
        raise SchemaError(f"{name}: a value is too large for a 32-bit float")
    return found


def _logprobs(data: ScoredData, lengths: Items[int], mask: NDArray[np.bool_]) -> bytes | None:
    """Return the logprobs [T], 0 at tokens that are not trained on: the 1.0 that clients send there is no logprob."""
    if data.inference_logprobs is None:
        return None
    values = _flat("inference_logprobs", data.inference_logprobs, lengths)
    return as_bytes(np.where(mask, values, np.float32(0.0)), "float32")


def _column(name: str, rows: list[list[float]] | None, lengths: Items[int]) -> bytes | None:
    return None if rows is None else as_bytes(_flat(name, rows, lengths), "float32")


def _ignored(data: ScoredData, origin: GroupOrigin) -> dict[str, Any]:
    """Return the fields that are not used: the run's own trainer computes the reference model's logprobs itself."""
    return {"ignored": ["ref_logprobs"]} if origin.limits.reads is not None and data.ref_logprobs is not None else {}


def _columns(data: ScoredData, lengths: Items[int], tokens: NDArray[np.int32], *, whole: bool) -> dict[str, Column]:
    """Return the further columns: all for a trainer of `whole` groups, else only the teacher's logprobs [T]."""
    found = {}
    reference = _column("ref_logprobs", data.ref_logprobs, lengths)
    if reference is not None and whole:
        found["ref_logprobs"] = Column(dtype="float32", data=reference)
    if (data.distill_token_ids is None) != (data.distill_logprobs is None):
        raise SchemaError("distill_token_ids, distill_logprobs: one came without the other")
    if data.distill_token_ids is not None and data.distill_logprobs is not None:
        ids, logprobs = _alternatives(data.distill_token_ids, data.distill_logprobs, lengths)
        width = ids.shape[1]
        if width:
            found[TEACHER_COLUMN] = Column(dtype="float32", data=_teacher_logprobs(ids, logprobs, tokens))
        if width and whole:
            # token -1: that position has fewer than `width` alternatives, and its logprob means nothing
            found["distill_token_ids"] = Column(dtype="int32", data=as_bytes(ids, "int32"), width=width)
            found["distill_logprobs"] = Column(dtype="float32", data=as_bytes(logprobs, "float32"), width=width)
    return found


def _alternatives(
    token_ids: list[list[list[int]]], values: list[list[list[float]]], lengths: Items[int]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the teacher's alternatives as ids [T, K], -1 where there are fewer, and their logprobs [T, K]."""
    ids = _ragged("distill_token_ids", token_ids, lengths)
    logprobs = _ragged("distill_logprobs", values, lengths)
    ks = [len(row) for row in ids]
    if ks != [len(row) for row in logprobs]:
        raise SchemaError("distill_token_ids, distill_logprobs: a position has more of one than of the other")
    there = np.arange(max(ks, default=0)) < np.array(ks)[:, None]
    packed_ids = np.full(there.shape, -1, np.int32)
    packed_ids[there] = [token for row in ids for token in row]
    packed = np.zeros(there.shape, np.float32)
    with np.errstate(over="ignore"):  # as in `_flat`
        packed[there] = [value for row in logprobs for value in row]
    if not np.isfinite(packed).all():
        raise SchemaError("distill_logprobs: a value is too large for a 32-bit float")
    if packed.max(initial=0.0) > _LOGPROB_SLACK:
        raise SchemaError(f"distill_logprobs: {packed.max():g} is above 0, which no log-probability is")
    return packed_ids, packed


def _teacher_logprobs(ids: NDArray[np.int32], logprobs: NDArray[np.float32], tokens: NDArray[np.int32]) -> bytes:
    """Return the teacher's logprob of each token [T], NaN where the token is not among its alternatives."""
    same = ids == tokens[:, None]
    found = logprobs[np.arange(len(tokens)), same.argmax(axis=1)]
    return as_bytes(np.where(same.any(axis=1), found, np.float32(np.nan)), "float32")


def _ragged(name: str, rows: list[list[list[Any]]], lengths: Items[int]) -> list[list[Any]]:
    if [len(row) for row in rows] != list(lengths):
        raise SchemaError(f"{name}: needs a list for each token of each sequence")
    return [position for row in rows for position in row]


def _message(said: dict[str, Any]) -> Message:
    if "role" not in said or "content" not in said:
        raise SchemaError("messages: a message must have 'role' and 'content' fields")
    content, calls = said["content"], said.get("tool_calls") or []
    return Message(
        role=str(said["role"]),
        content=content if isinstance(content, str) else "" if content is None else _text(content),
        name=said["name"] if isinstance(said.get("name"), str) else None,
        tool_calls=[_tool_call(call) for call in calls] if isinstance(calls, list) else [],
        tool_call_id=said["tool_call_id"] if isinstance(said.get("tool_call_id"), str) else None,
    )


def _tool_call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise SchemaError('messages: a tool call is {"id", "function": {"name", "arguments"}}')
    arguments, name = function.get("arguments", ""), call.get("id")
    return ToolCall(
        name=function["name"],
        arguments=arguments if isinstance(arguments, str) else _text(arguments),
        id=name if isinstance(name, str) else None,
    )


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _extras(data: ScoredData) -> dict[str, Any]:
    kept = {name: getattr(data, name) for name in ("overrides", "group_overrides", "images")}
    return {name: value for name, value in kept.items() if value is not None}


def _item_name(data: ScoredData) -> str | None:
    given = (data.group_overrides or {}).get(_ITEM)
    return None if given is None else check_item_name(f"group_overrides.{_ITEM}", given)


def _item_of_prompt(tokens: list[int], mask: NDArray[np.bool_]) -> str:
    """Return a name that groups of the same prompt share: that of the tokens before the first trained one."""
    prompt = tokens[: int(mask.argmax())] if mask.any() else tokens
    return name_of_prompt(as_bytes(prompt, "int32"))
