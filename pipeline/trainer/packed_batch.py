"""Packs the numpy arrays of single sequences into right-padded torch tensors.

It checks each `TrainingSequence` and returns a `PackedBatch`. Guarantees that a value at a position the mask leaves out
(prompt, padding) is 0, that every value is finite, and that rows keep the given order.

Dimension suffixes: B sequences, b some of them, T tokens (the longest sequence), K the teacher's likeliest
tokens at a position, C = K + 1 with all others as one, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from lachesis.pipeline.common.number_arguments import check_kind, listed
from lachesis.pipeline.model.packed_rows import PackedRows, shared_starts
from lachesis.pipeline.trainer.training_sequence import LOGPROB_SLACK, TrainingSequence, form_fault, sequence_fault
from lachesis.schemas.errors import DataError

__all__ = ["PackedBatch", "move_tensor", "pack"]

_MAX_PADDED = 4
_MIN_TOKENS = 0.97
"""Rows of which this share is tokens, or more, stay padded: bringing them into one row would cost as much."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A padded batch of B sequences, T tokens wide."""

    tokens_BT: torch.Tensor
    """int64; padding holds the pad id."""
    mask_BT: torch.Tensor
    """bool; the tokens the loss covers."""
    logprobs_BT: torch.Tensor
    """float32; of the rollout, 0 off the mask."""
    advantages_BT: torch.Tensor
    """float32; 0 off the mask."""
    teacher_logprobs_BT: torch.Tensor
    """float32; 0 off the teacher's mask."""
    teacher_mask_BT: torch.Tensor
    """bool; true where the mask is and the teacher gave a logprob."""
    teacher_spans_BT: torch.Tensor | None
    """int64; position in the row at which a token's span begins, its own where the teacher has a logprob for each
    token. None: it has for all."""
    teacher_ids_BTK: torch.Tensor | None
    """int64; the teacher's likeliest tokens, the first again where there are fewer. None: no sequence has any."""
    teacher_topk_BTC: torch.Tensor | None
    """float32; C = K + 1: their logprobs, the last of all other tokens together; -inf where there is none."""
    teacher_topk_mask_BT: torch.Tensor | None
    """bool; true where the mask is and the teacher gave its likeliest tokens."""
    lengths_B: torch.Tensor
    """int64; tokens of each sequence without padding."""
    sample_tokens_B: torch.Tensor
    """int64; trained tokens of all sequences of the row's sample, those of other micro-batches included."""
    sample_sequences_B: torch.Tensor
    """int64; how many sequences these are: 1, unless a sample has several."""
    group_ids: tuple[str, ...]
    """[B]"""
    samples: tuple[int, ...]
    """[B]; place of the row's sample in its group; of a row without a group, its own place."""
    policy_steps: tuple[int, ...]
    """[B]"""
    prepared: tuple[tuple[Any, ...], ...]
    """[B]; see `TrainingSequence.prepared`."""
    in_one_row: PackedRows | None = None
    """How its tokens lie in one row, if the model is to see them so; None: it sees them padded."""

    @classmethod
    def idle(cls) -> PackedBatch:
        """Return one row of padding that counts as no sequence: the batch of a rank that has nothing to train."""
        zeros_12, no_12 = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool)
        return cls(
            tokens_BT=torch.zeros(1, 2, dtype=torch.int64),
            mask_BT=no_12,
            logprobs_BT=zeros_12,
            advantages_BT=zeros_12,
            teacher_logprobs_BT=zeros_12,
            teacher_mask_BT=no_12,
            teacher_spans_BT=None,
            teacher_ids_BTK=None,
            teacher_topk_BTC=None,
            teacher_topk_mask_BT=None,
            lengths_B=torch.zeros(1, dtype=torch.int64),
            sample_tokens_B=torch.zeros(1, dtype=torch.int64),
            sample_sequences_B=torch.zeros(1, dtype=torch.int64),
            group_ids=(),
            samples=(),
            policy_steps=(),
            prepared=(),
        )

    @property
    def sequences(self) -> int:
        """B."""
        return len(self.group_ids)

    @property
    def sample_ids(self) -> list[tuple[str, int]]:
        """Group and place of the row's sample [B]."""
        return list(zip(self.group_ids, self.samples, strict=True))

    @property
    def trainable_tokens(self) -> int:
        """Tokens the loss covers."""
        return int(self.mask_BT.sum())

    def microbatches(self, max_tokens: int) -> Iterator[tuple[torch.Tensor, PackedBatch]]:
        """Yield rows of like length as batches of at most `max_tokens` padded tokens, the longest first.

        Each batch comes with its row numbers (int64 [b]). Every row comes exactly once, and each batch is trimmed to
        its longest row. A row longer than `max_tokens` makes a batch of its own. The batch that needs the most memory
        is computed first, so that a shortage shows at once.
        """
        longest_first = torch.argsort(self.lengths_B, descending=True, stable=True)
        start = 0
        while start < self.sequences:
            rows = max(1, max_tokens // int(self.lengths_B[longest_first[start]]))
            rows_b = longest_first[start : start + rows]
            yield rows_b, self.rows(rows_b)
            start += rows

    def microbatches_of_tokens(
        self, max_tokens: int, *, by_group: bool = False
    ) -> Iterator[tuple[torch.Tensor, PackedBatch]]:
        """Yield as `microbatches` batches of at most `max_tokens` tokens, padding not counted.

        Padded a batch would have at most `_MAX_PADDED` times as many: what a loss keeps for each token is padded.
        `by_group`: rows of a group are side by side, the group with the longest row first, so that they can share.
        """
        longest_first = torch.argsort(self.lengths_B, descending=True, stable=True)
        if by_group:
            groups: dict[str, list[int]] = {}
            for row in longest_first.tolist():
                groups.setdefault(self.group_ids[row] or f"row {row}", []).append(row)
            longest_first = torch.tensor([row for rows in groups.values() for row in rows])
        lengths = self.lengths_B[longest_first].tolist()
        start = end = tokens = widest = 0
        while start < self.sequences:
            while end < self.sequences and (
                end == start
                or (
                    tokens + lengths[end] <= max_tokens
                    and (end + 1 - start) * max(widest, lengths[end]) <= _MAX_PADDED * max_tokens
                )
            ):
                tokens, widest = tokens + lengths[end], max(widest, lengths[end])
                end += 1
            yield longest_first[start:end], self.rows(longest_first[start:end])
            start, tokens, widest = end, 0, 0

    def on(self, device: torch.device, *, in_one_row: bool, always: bool = False, trees: bool = False) -> PackedBatch:
        """Return the batch on `device`, its tokens in one row if requested and if that spares enough.

        `always`: also where it spares nothing, so that a model sees rows in no other form. `trees`: rows of a group
        share the tokens with which they begin alike. The batch must be in main memory then.
        """
        moved, lengths = self.to(device), self.lengths_B.tolist()
        if not in_one_row or not self.sequences:
            return moved
        shared = shared_starts(self.tokens_BT, lengths, self.group_ids) if trees else None
        tokens = sum(lengths) - sum(start.tokens for start in shared or ())
        if not always and tokens > _MIN_TOKENS * self.tokens_BT.numel():
            return moved
        rows = PackedRows.of(lengths, self.tokens_BT.shape[1], lambda values: move_tensor(values, device), shared)
        return replace(moved, in_one_row=rows)

    @property
    def computed_tokens(self) -> int:
        """Tokens that the model's layers see, padding counted where they see it."""
        return self.tokens_BT.numel() if self.in_one_row is None else self.in_one_row.tokens

    def of_group(self, group: str) -> PackedBatch:
        """Return the rows of one group, trimmed to the longest of them; `idle` where it has none."""
        rows = [row for row, name in enumerate(self.group_ids) if name == group]
        return self.rows(torch.tensor(rows)) if rows else PackedBatch.idle()

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch with its tensors on `device`; the processor does not wait for them there."""
        return self._each_tensor(lambda values: move_tensor(values, device))

    def rows(self, rows_b: torch.Tensor) -> PackedBatch:
        """Return some rows, int64 [b], trimmed to the longest of them."""
        width = int(self.lengths_B[rows_b].max())
        rows = rows_b.tolist()
        narrow = self._each_tensor(lambda values: values[rows_b] if values.dim() == 1 else values[rows_b, :width])
        return replace(
            narrow,
            group_ids=tuple(self.group_ids[row] for row in rows),
            samples=tuple(self.samples[row] for row in rows),
            policy_steps=tuple(self.policy_steps[row] for row in rows),
            prepared=tuple(self.prepared[row] for row in rows),
        )

    def _each_tensor(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedBatch:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: change(values) for name, values in columns.items() if torch.is_tensor(values)}
        return replace(self, **changed)


def pack(sequences: Sequence[TrainingSequence], *, pad_id: int = 0) -> PackedBatch:
    """Return the padded batch of `sequences`, in their order.

    Raises DataError, naming sequence and group, when there is none, or when one is empty, has arrays of different
    lengths or of other types, a true mask at position 0, a negative token id, or a value under the mask that is not
    finite or (a logprob) above 0.
    """
    sequences = listed("sequence", sequences)
    if not sequences:
        raise DataError("a batch needs at least one sequence.")
    for index, sequence in enumerate(sequences):
        check_kind(f"sequence {index} of the batch", sequence, TrainingSequence)
        with_teacher = sequence.teacher_logprobs is not None or sequence.teacher_topk is not None
        _refuse(index, sequence, sequence_fault(sequence) if with_teacher else form_fault(sequence))
    rows, width = len(sequences), max(len(sequence.tokens) for sequence in sequences)
    tokens_BT = np.full((rows, width), pad_id, np.int64)
    mask_BT = np.zeros((rows, width), np.bool_)
    logprobs_BT, advantages_BT, teacher_BT = (np.zeros((rows, width), np.float32) for _ in range(3))
    teacher_mask_BT = np.zeros((rows, width), np.bool_)
    with np.errstate(over="ignore"):  # what is too large for the tensors is found as infinite
        for row, sequence in enumerate(sequences):
            length, mask_T = len(sequence.tokens), sequence.loss_mask
            tokens_BT[row, :length] = sequence.tokens
            mask_BT[row, :length] = mask_T
            logprobs_BT[row, :length] = sequence.logprobs
            advantages_BT[row, :length] = sequence.advantage
            if sequence.teacher_logprobs is not None:
                there_T = mask_T & ~np.isnan(sequence.teacher_logprobs)
                if sequence.teacher_spans is not None:
                    there_T &= sequence.teacher_spans >= 0
                teacher_BT[row, :length] = np.where(there_T, sequence.teacher_logprobs, 0)
                teacher_mask_BT[row, :length] = there_T
        for values_BT in (logprobs_BT, advantages_BT):
            np.copyto(values_BT, 0, where=~mask_BT)
    if (  # of all at once: which sequence it is costs more
        mask_BT[:, 0].any()
        or min(int(sequence.tokens.min()) for sequence in sequences) < 0
        or not all(np.isfinite(values_BT).all() for values_BT in (logprobs_BT, advantages_BT))
        or float(logprobs_BT.max()) > LOGPROB_SLACK
    ):
        for index, sequence in enumerate(sequences):
            _refuse(index, sequence, sequence_fault(sequence))
    return PackedBatch(
        tokens_BT=torch.from_numpy(tokens_BT),
        mask_BT=torch.from_numpy(mask_BT),
        logprobs_BT=torch.from_numpy(logprobs_BT),
        advantages_BT=torch.from_numpy(advantages_BT),
        teacher_logprobs_BT=torch.from_numpy(teacher_BT),
        teacher_mask_BT=torch.from_numpy(teacher_mask_BT),
        teacher_spans_BT=_packed_spans(sequences, width),
        **_packed_alternatives(sequences, width),
        lengths_B=torch.tensor([len(sequence.tokens) for sequence in sequences]),
        **_of_samples(sequences),
        group_ids=tuple(sequence.group_id for sequence in sequences),
        policy_steps=tuple(sequence.policy_step for sequence in sequences),
        prepared=tuple(sequence.prepared for sequence in sequences),
    )


def _refuse(index: int, sequence: TrainingSequence, fault: str | None) -> None:
    if fault is not None:
        raise DataError(f"sequence {index} of the batch (group {sequence.group_id!r}) {fault}.")


def move_tensor(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on `device`.

    To a GPU it travels from pinned memory, behind the work that is queued there.
    """
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def _of_samples(sequences: Sequence[TrainingSequence]) -> dict[str, Any]:
    """Return for each row its sample, and the trained tokens and the trained sequences of that.

    A sequence of no group is a sample of its own.
    """
    ids = [(one.group_id, one.sample if one.group_id else row) for row, one in enumerate(sequences)]
    tokens, rows = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for name, sequence in zip(ids, sequences, strict=True):
        count = int(sequence.loss_mask.sum())
        tokens[name] += count
        rows[name] += count > 0
    return {
        "samples": tuple(sample for _, sample in ids),
        "sample_tokens_B": torch.tensor([tokens[name] for name in ids]),
        "sample_sequences_B": torch.tensor([rows[name] for name in ids]),
    }


def _packed_spans(sequences: Sequence[TrainingSequence], width: int) -> torch.Tensor | None:
    if all(sequence.teacher_spans is None for sequence in sequences):
        return None
    spans_BT = np.tile(np.arange(width), (len(sequences), 1))
    for row, sequence in enumerate(sequences):
        if (spans_T := sequence.teacher_spans) is not None:
            spans_BT[row, : len(spans_T)] = np.where(spans_T >= 0, spans_T, np.arange(len(spans_T)))
    return torch.from_numpy(spans_BT)


def _packed_alternatives(sequences: Sequence[TrainingSequence], width: int) -> dict[str, Any]:
    """Return the columns of the teacher's likeliest tokens, K being the most that any sequence has."""
    k = max((one.teacher_topk[0].shape[1] for one in sequences if one.teacher_topk is not None), default=0)
    if not k:
        return {"teacher_ids_BTK": None, "teacher_topk_BTC": None, "teacher_topk_mask_BT": None}
    ids_BTK = np.zeros((len(sequences), width, k), np.int64)
    topk_BTC = np.full((len(sequences), width, k + 1), -np.inf, np.float32)
    mask_BT = np.zeros((len(sequences), width), np.bool_)
    for row, sequence in enumerate(sequences):
        if sequence.teacher_topk is None:
            continue
        ids_TK, logprobs_TC = sequence.teacher_topk
        length, own = ids_TK.shape
        ids_BTK[row, :length] = np.maximum(ids_TK[:, :1], 0)  # where there is none: one that is there already
        ids_BTK[row, :length, :own] = np.where(ids_TK >= 0, ids_TK, ids_BTK[row, :length, :1])
        topk_BTC[row, :length, :own] = np.where(ids_TK >= 0, logprobs_TC[:, :-1], -np.inf)
        topk_BTC[row, :length, k] = logprobs_TC[:, -1]
        mask_BT[row, :length] = sequence.loss_mask & (ids_TK[:, 0] >= 0)
    columns = {"teacher_ids_BTK": ids_BTK, "teacher_topk_BTC": topk_BTC, "teacher_topk_mask_BT": mask_BT}
    return {name: torch.from_numpy(values) for name, values in columns.items()}
