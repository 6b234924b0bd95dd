"""One training sequence as a row: what the rollout holds of it, and what was derived.

The schema of every export.

A group becomes as many rows as it has sequences, one after the other; what belongs to the whole group or sample is on
each of them, attachments on the first alone. Free-form data (`task`, `generation`, `metadata`) is JSON text, so that
every row has the same columns whatever it holds. What is missing is null, with one exception that is the rollout's own:
where `loss_mask` is 0 there is no logprob, and 0 stands there.

`group_of(rows)` undoes `rows_of(group)` exactly, and `digest` proves it: it names the group's whole content but for its
run and its lease. How the schema may change: a column that readers can do without is added with a default of null;
whatever they would misread raises the number in `SCHEMA`.
"""

import hashlib
from collections.abc import Sequence as Items
from itertools import pairwise
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.annotations import GroupReward, GroupScore, Stamp, Verdict
from lachesis.schemas.codec import MAX_ERROR_CHARS, UNREADABLE
from lachesis.schemas.columns import Column, DType, as_bytes
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import OutcomeKind
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import Attachment, Dispatch, Message, RolloutGroup, Sequences, ToolCall, VersionSpan
from lachesis.schemas.sequences import FinishReason, TokenSequence
from lachesis.schemas.values import Count, Finite

__all__ = ["SCHEMA", "DerivedColumns", "RolloutRow", "content_digest", "group_of", "rows_of"]

SCHEMA: Final = "lachesis.rollout/1"
"""Name and version of this schema, on every row and in a Parquet file's metadata under the key `lachesis`."""

T = TypeVar("T")


class VersionSpanRow(msgspec.Struct, frozen=True):
    """From token `start` of the sequence on, tokens are of `policy_versions[version]`."""

    start: int
    version: int


class RewardComponentRow(msgspec.Struct, frozen=True):
    """A reward that the environment itself gave the sample."""

    name: str
    value: float | None


class RatingRow(msgspec.Struct, frozen=True):
    """One rater's calibrated rating of the sample; where it is missing the status says why."""

    rater: str
    rating: float | None
    status: str | None


class RaterVersion(msgspec.Struct, frozen=True):
    """Which version of a rater rated."""

    rater: str
    version: str


class ToolCallRow(msgspec.Struct, frozen=True):
    """A call of a tool; `arguments` is text."""

    name: str
    arguments: str
    id: str | None


class ChatMessageRow(msgspec.Struct, frozen=True):
    """A chat message; `attachments` are indexes into those of the group."""

    role: str
    content: str
    name: str | None = None
    tool_calls: list[ToolCallRow] = []
    tool_call_id: str | None = None
    attachments: list[int] = []


class AttachmentRow(msgspec.Struct, frozen=True):
    """An attachment."""

    mime: str
    data: bytes


class TokenColumn(msgspec.Struct, frozen=True):
    """A further per-token column: `width` little-endian values of `dtype` for each token of the sequence."""

    name: str
    dtype: DType
    width: int
    data: bytes


class RowTimes(msgspec.Struct, frozen=True):
    """A stage's stamp, Unix ns."""

    stage: str
    stored_ns: int
    start_ns: int
    end_ns: int
    attempt: int


class ItemDraw(msgspec.Struct, frozen=True):
    """How the curriculum drew the item."""

    index: Count
    snapshot_id: str
    probability: float


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row; T is the number of the sequence's tokens. `tokens` int32 [T], `loss_mask` int8 [T] (1: trained on),
    `logprobs` and `token_advantages` float32 [T]. `excluded`: the environment keeps the sample from being trained on.

    Of the rollout: everything up to `attachments`; `seq` and `stored_ns` say where and when it was stored. Derived, in
    `revision`: `score` to `stamps`, with `score` (before normalization), `ratings`, `length` (generated tokens),
    `reward`, `advantage` and `shaping` the sample's, and the others the group's. What became of it in the live run:
    `outcome` with its reason, and if it was batched the number of the batch and the advantage that it was given there.
    """

    schema: str
    group: str
    run: str
    env: str
    item: str
    producer: str
    epoch: int
    counter: int
    sequences: int
    sequence: int
    sample: int
    policy_versions: list[str]
    version_spans: list[VersionSpanRow]
    tokenizer_hash: str
    started_ns: int
    finish_reason: FinishReason
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.int8]
    logprobs: NDArray[np.float32] | None
    token_advantages: NDArray[np.float32] | None = None
    columns: list[TokenColumn] | None = None
    environment_rewards: list[RewardComponentRow] | None = None
    turn_rewards: list[float] | None = None
    turn_order: list[int] | None = None
    turn_parents: list[int] | None = None
    excluded: bool = False
    skill: str | None = None
    difficulty: float | None = None
    dispatch: ItemDraw | None = None
    task: str = "{}"
    generation: str = "{}"
    metadata: str = "{}"
    messages: list[ChatMessageRow] | None = None
    attachments: list[AttachmentRow] | None = None
    digest: str | None = None
    seq: int | None = None
    stored_ns: int | None = None
    revision: str | None = None
    score: Finite | None = None
    ratings: list[RatingRow] | None = None
    length: int | None = None
    reward: Finite | None = None
    advantage: Finite | None = None
    turn_advantages: list[float] | None = None
    shaping: Finite | None = None
    verdict: Verdict | None = None
    reason: str | None = None
    success: Finite | None = None
    disagreement_mean: Finite | None = None
    disagreement_max: Finite | None = None
    reward_mean: Finite | None = None
    reward_std: Finite | None = None
    reward_range: Finite | None = None
    n_valid: int | None = None
    shaping_scale: Finite | None = None
    snapshot: str | None = None
    ensemble: str | None = None
    raters: list[RaterVersion] | None = None
    estimator: str | None = None
    stamps: list[RowTimes] | None = None
    outcome: OutcomeKind | None = None
    outcome_reason: str | None = None
    batch: int | None = None
    batch_advantage: Finite | None = None


class DerivedColumns(msgspec.Struct, kw_only=True):
    """What was derived of a group; None: not, or it is no longer stored. `batch_advantages` has one entry a sample.

    `unscored` says why there is no score, where something does.
    """

    revision: str
    score: GroupScore | None = None
    ensemble: str | None = None
    raters: dict[str, str] | None = None
    reward: GroupReward | None = None
    estimator: str | None = None
    unscored: str | None = None
    outcome: OutcomeKind | None = None
    outcome_reason: str | None = None
    batch: int | None = None
    batch_advantages: list[float | None] | None = None


def content_digest(group: RolloutGroup) -> str:
    """Return what names all that the group holds, but for its run and its lease."""
    plain = _canonical(group).replace(run="", lease=None)
    # as dictionaries: the bytes of a struct depend on how many fields it may have, in which builds differ
    fields = msgspec.to_builtins(plain, builtin_types=(bytes,))
    return hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=16).hexdigest()


def rows_of(group: RolloutGroup, seq: int, stored_ns: int, derived: DerivedColumns) -> list[RolloutRow]:
    """Return the group's rows. Raises `SchemaError` where it holds what JSON does not."""
    group = _canonical(group)
    sequences = group.sequences
    shared = {
        "schema": SCHEMA,
        **{name: getattr(group, name) for name in ("run", "env", "item", "producer", "epoch", "counter")},
        **{name: getattr(group, name) for name in ("policy_versions", "tokenizer_hash", "started_ns", "skill")},
        "group": group.id,
        "difficulty": group.difficulty,
        "dispatch": _draw(group.dispatch),
        **{name: _text(name, getattr(group, name)) for name in ("task", "generation", "metadata")},
        "sequences": len(sequences),
        "digest": content_digest(group),
        "seq": seq,
        "stored_ns": stored_ns,
        **_of_group(derived),
    }
    return [
        RolloutRow(
            **shared,
            **_of_sequence(sequences, i, sequence),
            **_of_sample(group, derived, sequences.sample_index[i] if sequences.sample_index is not None else i),
            attachments=[AttachmentRow(one.mime, one.data) for one in group.attachments] or None if i == 0 else None,
        )
        for i, sequence in enumerate(sequences)
    ]


def group_of(rows: Items[RolloutRow], *, run: str) -> RolloutGroup:
    """Return the group that `rows`, which are all of its rows in order, were made of, as one of `run`.

    Raises `SchemaError` where they are of another schema, do not fit together, or hold something else than was written.
    """
    first = rows[0]
    if first.schema != SCHEMA:
        raise SchemaError(f"schema: {first.schema[:60]!r}, but this build reads {SCHEMA}")
    if len(rows) != first.sequences or any(row.sequence != i for i, row in enumerate(rows)):
        raise SchemaError(
            f"sequence: the rows of group {first.group[:40]} are {_few([row.sequence for row in rows])}, not 0 to "
            f"{first.sequences - 1}: all rows of a group must follow each other, in order"
        )
    lengths = [_check_lengths(row) for row in rows]
    index = [row.sample for row in rows]
    firsts = {row.sample: row for row in reversed(rows)}
    if sorted(firsts) != list(range(len(firsts))):
        raise SchemaError(f"sample: {_few(index)}; samples are numbered 0, 1, ... without a gap")
    samples = [firsts[sample] for sample in range(len(firsts))]
    group = RolloutGroup(
        id=first.group,
        run=run,
        env=first.env,
        item=first.item,
        producer=first.producer,
        epoch=first.epoch,
        counter=first.counter,
        policy_versions=first.policy_versions,
        sequences=Sequences(
            offsets=as_bytes(np.cumsum([0, *lengths]), "int32"),
            tokens=as_bytes(np.concatenate([row.tokens for row in rows]), "int32"),
            loss_mask=pack_mask(np.concatenate([row.loss_mask for row in rows]) != 0),
            logprobs=_floats("logprobs", [row.logprobs for row in rows]),
            finish_reasons=[row.finish_reason for row in rows],
            version_spans=[VersionSpan(i, s.start, s.version) for i, row in enumerate(rows) for s in row.version_spans],
            sample_index=None if index == list(range(len(rows))) else index,
            rewards=_rewards(samples),
            turn_rewards=_all_or_none("turn_rewards", [row.turn_rewards for row in samples]),
            turn_order=_all_or_none("turn_order", [row.turn_order for row in samples]),
            turn_parents=_all_or_none("turn_parents", [row.turn_parents for row in samples]),
            token_advantages=_floats("token_advantages", [row.token_advantages for row in rows]),
            columns=_columns(rows),
            excluded_samples=[sample for sample, row in enumerate(samples) if row.excluded],
        ),
        tokenizer_hash=first.tokenizer_hash,
        started_ns=first.started_ns,
        skill=first.skill,
        difficulty=first.difficulty,
        dispatch=Dispatch(**msgspec.structs.asdict(first.dispatch)) if first.dispatch else None,
        task=_dict("task", first.task),
        messages=[
            [_message(row) for row in conversation]
            for conversation in _all_or_none("messages", [row.messages for row in samples]) or []
        ],
        attachments=[Attachment(mime=one.mime, data=one.data) for one in first.attachments or []],
        generation=_dict("generation", first.generation),
        metadata=_dict("metadata", first.metadata),
    )
    group.check()
    try:
        found = content_digest(group)
    except UNREADABLE as error:  # a number in free-form data that the wire has not
        raise SchemaError(str(error)[:MAX_ERROR_CHARS]) from error
    if first.digest not in {None, found}:
        raise SchemaError(
            f"digest: group {group.id} holds something else than was exported ({found}, not {first.digest}); export it "
            "again, or set `digest` to null to import it as it is"
        )
    return group


# -- a group's parts


def _canonical(group: RolloutGroup) -> RolloutGroup:
    """Return the one form of what means the same: spans by sequence, and no index of samples that says nothing."""
    sequences = group.sequences
    spans = sorted(sequences.version_spans, key=lambda span: span.sequence)
    index = sequences.sample_index
    if index == list(range(len(sequences))):
        index = None
    if spans != sequences.version_spans or index != sequences.sample_index:
        group = group.replace(sequences=msgspec.structs.replace(sequences, version_spans=spans, sample_index=index))
    return group


def _of_sequence(sequences: Sequences, i: int, sequence: TokenSequence) -> dict[str, Any]:
    cuts, total = sequences.cuts(), sequences.n_tokens
    part = slice(int(cuts[i]), int(cuts[i + 1]))
    return {
        "sequence": i,
        "finish_reason": sequence.finish_reason,
        "tokens": sequence.tokens,
        "loss_mask": sequence.loss_mask.astype(np.int8),
        "logprobs": sequence.logprobs,
        "token_advantages": sequence.token_advantages,
        "columns": [
            TokenColumn(name, one.dtype, one.width, _bytes_of(one, total, part))
            for name, one in sequences.columns.items()
        ]
        or None,
        "version_spans": [
            VersionSpanRow(span.start, span.version) for span in sequences.version_spans if span.sequence == i
        ],
    }


def _bytes_of(column: Column, total: int, part: slice) -> bytes:
    size = len(column.data) // total
    return column.data[part.start * size : part.stop * size]


def _of_sample(group: RolloutGroup, derived: DerivedColumns, sample: int) -> dict[str, Any]:
    sequences, score, reward = group.sequences, derived.score, derived.reward
    return {
        "sample": sample,
        "environment_rewards": [RewardComponentRow(name, values[sample]) for name, values in sequences.rewards.items()]
        or None,
        "turn_rewards": None if sequences.turn_rewards is None else sequences.turn_rewards[sample],
        "turn_order": None if sequences.turn_order is None else sequences.turn_order[sample],
        "turn_parents": None if sequences.turn_parents is None else sequences.turn_parents[sample],
        "excluded": sample in sequences.excluded_samples,
        "messages": [_message_row(message) for message in group.messages[sample]] if group.messages else None,
        "score": _at(score.scores if score else None, sample),
        "ratings": None if score is None else _ratings(score, sample),
        "length": _at(score.lengths if score else None, sample),
        "reward": _at(reward.rewards if reward else None, sample),
        "advantage": _at(reward.advantages if reward else None, sample),
        "turn_advantages": _at(reward.turn_advantages if reward else None, sample),
        "shaping": _at(reward.shaping if reward else None, sample),
        "batch_advantage": _at(derived.batch_advantages, sample),
    }


def _of_group(derived: DerivedColumns) -> dict[str, Any]:
    score, reward = derived.score, derived.reward
    apart = score.disagreement if score is not None else None
    stamps = reward.stamps if reward is not None and reward.stamps else score.stamps if score is not None else []
    return {
        "revision": derived.revision,
        "success": score.success if score else None,
        "disagreement_mean": apart[0] if apart else None,
        "disagreement_max": apart[1] if apart else None,
        "verdict": reward.verdict if reward else None,
        "reason": (reward.reason if reward else None) or derived.unscored,
        "reward_mean": reward.mean if reward else None,
        "reward_std": reward.std if reward else None,
        "reward_range": reward.range if reward else None,
        "n_valid": reward.n_valid if reward else None,
        "shaping_scale": reward.shaping_scale if reward else None,
        "snapshot": reward.snapshot if reward else None,
        "ensemble": derived.ensemble,
        "raters": None if derived.raters is None else [RaterVersion(*pair) for pair in derived.raters.items()],
        "estimator": derived.estimator,
        "stamps": [_times(stamp) for stamp in stamps] or None,
        "outcome": derived.outcome,
        "outcome_reason": derived.outcome_reason,
        "batch": derived.batch,
    }


def _at(values: Items[T | None] | None, sample: int) -> T | None:
    """Return the value of a sample; None where there is none, as where another rollout was given the group's id."""
    return values[sample] if values is not None and sample < len(values) else None


def _ratings(score: GroupScore, sample: int) -> list[RatingRow]:
    def status(rater: str) -> str | None:
        return _at(score.statuses.get(rater), sample)

    return [RatingRow(rater, _at(values, sample), status(rater)) for rater, values in score.ratings.items()]


def _times(stamp: Stamp) -> RowTimes:
    return RowTimes(stamp.stage, stamp.stored_ns, stamp.start_ns, stamp.end_ns, stamp.attempt)


def _draw(dispatch: Dispatch | None) -> ItemDraw | None:
    return None if dispatch is None else ItemDraw(dispatch.index, dispatch.snapshot_id, dispatch.probability)


def _message_row(message: Message) -> ChatMessageRow:
    calls = [ToolCallRow(call.name, call.arguments, call.id) for call in message.tool_calls]
    return ChatMessageRow(message.role, message.content, message.name, calls, message.tool_call_id, message.attachments)


def _message(row: ChatMessageRow) -> Message:
    return Message(
        role=row.role,
        content=row.content,
        name=row.name,
        tool_calls=[ToolCall(name=call.name, arguments=call.arguments, id=call.id) for call in row.tool_calls],
        tool_call_id=row.tool_call_id,
        attachments=row.attachments,
    )


def _text(name: str, value: dict[str, Any]) -> str:
    """Return free-form data as JSON. Raises `SchemaError` where reading it would not give the same."""
    text = msgspec.json.encode(value)
    if _same(msgspec.json.decode(text), value):
        return text.decode()
    raise SchemaError(f"{name}: holds bytes or numbers that JSON has not, so it could not be read back as it is")


def _same(one: object, other: object) -> bool:
    return msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)


# -- rows' parts


def _check_lengths(row: RolloutRow) -> int:
    total = len(row.tokens)
    for name in ("loss_mask", "logprobs", "token_advantages"):
        values = getattr(row, name)
        if values is not None and len(values) != total:
            raise SchemaError(f"{name}: {len(values)} values for the {total} tokens of sequence {row.sequence}")
    return total


def _rewards(samples: Items[RolloutRow]) -> dict[str, list[float | None]]:
    names = {tuple(one.name for one in row.environment_rewards or []) for row in samples}
    if len(names) != 1:
        raise SchemaError("environment_rewards: the samples of a group have different ones")
    return {
        name: [(row.environment_rewards or [])[i].value for row in samples] for i, name in enumerate(next(iter(names)))
    }


def _all_or_none(name: str, values: Items[list[Any] | None]) -> list[list[Any]] | None:
    given = [value for value in values if value is not None]
    if given and len(given) != len(values):
        raise SchemaError(f"{name}: null for some samples of a group, but not for all")
    return given or None


def _floats(name: str, values: Items[NDArray[np.float32] | None]) -> bytes | None:
    given = [value for value in values if value is not None]
    if not given:
        return None
    if len(given) != len(values):
        raise SchemaError(f"{name}: null for some sequences of a group, but not for all")
    return as_bytes(np.concatenate(given), "float32")


def _columns(rows: Items[RolloutRow]) -> dict[str, Column]:
    kinds = {tuple((one.name, one.dtype, one.width) for one in row.columns or []) for row in rows}
    if len(kinds) != 1:
        raise SchemaError("columns: the sequences of a group have different ones")
    return {
        name: Column(dtype=dtype, width=width, data=b"".join((row.columns or [])[i].data for row in rows))
        for i, (name, dtype, width) in enumerate(next(iter(kinds)))
    }


def _dict(name: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except UNREADABLE as error:
        raise SchemaError(f"{name}: {str(error)[:MAX_ERROR_CHARS]}") from error


def _few(numbers: Items[int]) -> str:
    """Return numbers as text, runs of neighbours in short."""
    shown = ", ".join(map(str, numbers[:8]))
    rising = all(b == a + 1 for a, b in pairwise(numbers))
    return f"{numbers[0]} to {numbers[-1]}" if rising and len(numbers) > 2 else shown + ", ..." * (len(numbers) > 8)
