"""Turns a batch's groups into training sequences: tokens, advantages and teacher logprobs.

Pure. A sample whose advantage is None, or that its environment excludes, is left out; so is one that was cut off at its
length limit, where the trainer does not train on these. Guarantees that a group which
this trainer cannot use is left out with a reason and costs no other group of its batch; that the same groups give the
same choice; and that the advantages of the other groups stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.common.token_credit import token_credit
from lachesis.pipeline.common.trainability import TrainerLimits, TrainerReads, why_untrainable
from lachesis.pipeline.errors import UnsupportedError
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.training_sequence import TrainingSequence, value_fault
from lachesis.schemas.annotations import TeacherLogprobs
from lachesis.schemas.columns import view
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import MAX_DROP_REASON_CHARS, GroupDrops, GroupRef
from lachesis.schemas.rollout import RolloutGroup
from lachesis.schemas.sequences import TEACHER_COLUMN

__all__ = ["GroupInputs", "TrainableBatch", "select_trainable", "shuffled", "trainer_limits", "training_sequences"]


class GroupInputs(Protocol):
    """`training.inputs`, applied to a group's sequences; see `trainer/inputs/`."""

    def prepare_group(self, group: RolloutGroup) -> list[tuple[Any, ...]]:
        """Return for each sequence what each input made of it.

        Raises `DataError` where one cannot use the group.
        """


class TrainableBatch(NamedTuple):
    """The trained part of a batch. `dropped`: by sequence in ROLLOUTS why a group cannot be used."""

    refs: list[GroupRef]
    sequences: list[TrainingSequence]
    dropped: dict[int, str]

    def without(self, groups: Mapping[str, str]) -> TrainableBatch:
        """Return it without the groups of these ids, each given with the reason."""
        return TrainableBatch(
            [ref for ref in self.refs if ref.group not in groups],
            [sequence for sequence in self.sequences if sequence.group_id not in groups],
            self.dropped | {ref.seq: groups[ref.group] for ref in self.refs if ref.group in groups},
        )

    def drops(self, batch: int) -> list[GroupDrops]:
        """Return the record of groups dropped from batch number `batch`; equal reasons share an entry."""
        by_reason: dict[str, list[int]] = {}
        for seq, reason in sorted(self.dropped.items()):
            by_reason.setdefault(reason[:MAX_DROP_REASON_CHARS], []).append(seq)
        return [GroupDrops(batch, seqs, reason) for reason, seqs in by_reason.items()]


def trainer_limits(
    tokenizer_hash: str, vocabulary: int | None, reads: TrainerReads, learner: LearnerConfig
) -> TrainerLimits:
    """Return what a trainer with these settings of its steps can use."""
    return TrainerLimits(
        tokenizer_hash, vocabulary, reads, learner.temperature, truncated=not learner.loss.mask_truncated
    )


def select_trainable(
    payloads: Sequence[tuple[GroupRef, RolloutGroup, TeacherLogprobs | None]],
    limits: TrainerLimits,
    *,
    inputs: GroupInputs | None = None,
    unfetched: Mapping[int, str] | None = None,
    shuffle_seed: int | None = None,
) -> TrainableBatch:
    """Return the sequences of the groups that can be used, in the order given, and why the others cannot.

    `inputs`: the model's inputs other than text tokens. `unfetched` are groups of the batch that could not even be
    read. `shuffle_seed`: see `shuffled`.
    """
    dropped = dict(unfetched or {})
    refs, sequences = [], []
    for ref, group, teacher in payloads:
        used = ref if shuffle_seed is None else shuffled(ref, shuffle_seed)
        try:
            found = training_sequences(used, group, teacher, limits, inputs)
        except DataError as error:
            dropped[ref.seq] = str(error)
        else:
            refs.append(ref)
            sequences += found
    return TrainableBatch(refs, sequences, dropped)


def training_sequences(
    ref: GroupRef,
    group: RolloutGroup,
    teacher: TeacherLogprobs | None,
    limits: TrainerLimits,
    inputs: GroupInputs | None = None,
) -> list[TrainingSequence]:
    """Return the sequences of one group, each fit to be packed.

    `group` has been decoded, so its columns are checked.

    Raises `DataError` when the group does not fit its advantages or its teacher arrays, holds a value that no loss can
    take, or nothing to train on; `UnsupportedError` when this trainer cannot use it (see `why_untrainable`), or when it
    has no logprobs.
    """
    reason = why_untrainable(group, limits)
    if reason is not None:
        raise UnsupportedError(reason)
    credit_of = token_credit(ref, group)
    if teacher is not None and teacher.n_tokens != group.sequences.n_tokens:
        raise DataError(f"{teacher.n_tokens} teacher logprobs for {group.sequences.n_tokens} tokens")
    own_values = _own_teacher(group) if teacher is None else None
    of_teacher = None if teacher is None else _TeacherColumns(teacher)
    if of_teacher is not None and limits.vocabulary is not None and of_teacher.max_id >= limits.vocabulary:
        raise DataError(
            f"a likeliest token of teacher {teacher and teacher.teacher} is {of_teacher.max_id}, the model knows "
            f"{limits.vocabulary}"
        )
    prepared = None if inputs is None else inputs.prepare_group(group)
    cuts = group.sequences.cuts()
    samples = group.sequences.sample_index or range(len(group.sequences))
    left_out = _left_out(group, limits)
    found = []
    for i, (sequence, sample, credit) in enumerate(zip(group.sequences, samples, credit_of, strict=True)):
        if credit is None or sample in left_out or not sequence.loss_mask.any():
            continue
        if sequence.logprobs is None:
            raise UnsupportedError("it has no logprobs, so its policy cannot be compared with this one")
        at = slice(cuts[i], cuts[i + 1])
        columns: dict[str, Any] = {} if of_teacher is None else of_teacher.of_sequence(i, at)
        if own_values is not None:
            columns = {"teacher_logprobs": own_values[at]}
        training = TrainingSequence(
            tokens=sequence.tokens,
            loss_mask=sequence.loss_mask,
            logprobs=sequence.logprobs,
            advantage=credit,
            **columns,
            prepared=() if prepared is None else prepared[i],
            group_id=group.id,
            sample=sample,
            index=i,
            policy_step=ref.policy_step,
        )
        fault = value_fault(training)  # the other columns were checked when the group was decoded
        if fault is not None:
            raise DataError(f"sequence {i} {fault}")
        found.append(training)
    if not found:
        reason = "no sample has both an advantage and a token to train on"
        if not limits.truncated:
            reason += "; training.learner.loss.mask_truncated leaves out those cut off at their length limit"
        raise DataError(reason)
    return found


def _left_out(group: RolloutGroup, limits: TrainerLimits) -> set[int]:
    """Return the samples that are not trained on: excluded ones, and those cut off where the limits say so."""
    left_out = set(group.sequences.excluded_samples)
    if not limits.truncated:
        left_out |= {sample for sample, reason in enumerate(group.sequences.endings) if reason == "length"}
    return left_out


def _own_teacher(group: RolloutGroup) -> NDArray[np.float32] | None:
    """Return the logprobs [T] of the environment's teacher, NaN where it has none; None: no teacher."""
    column = group.sequences.columns.get(TEACHER_COLUMN)
    if column is None:
        return None
    return view(column.data, "float32", group.sequences.n_tokens, TEACHER_COLUMN)


class _TeacherColumns:
    """What the teacher gave for a group, column by column."""

    def __init__(self, teacher: TeacherLogprobs) -> None:
        self._missing = frozenset(teacher.missing)
        self._values, self._spans, self._alternatives = teacher.values(), teacher.spans(), teacher.alternatives()

    @property
    def max_id(self) -> int:
        """The largest id of a likeliest token, -1 where there is none."""
        return -1 if self._alternatives is None else int(self._alternatives[0].max(initial=-1))

    def of_sequence(self, i: int, at: slice) -> dict[str, Any]:
        """Return the teacher's fields of sequence `i`, whose tokens lie `at`."""
        if i not in self._missing:
            found: dict[str, Any] = {"teacher_logprobs": self._values[at]}
            if self._alternatives is not None:
                found["teacher_topk"] = tuple(column[at] for column in self._alternatives)
            return found
        if self._spans is None or not (self._spans[0][at] >= 0).any():
            return {}
        return {"teacher_logprobs": self._spans[1][at], "teacher_spans": self._spans[0][at]}


def shuffled(ref: GroupRef, seed: int) -> GroupRef:
    """Return the reference with its advantages shuffled among the samples.

    A control from which nothing can be learned.

    The order depends on the seed and the group alone.
    """
    rng = np.random.default_rng([seed, int(ref.group, 16)])
    order = rng.permutation(len(ref.advantages)).tolist()
    found = msgspec.structs.replace(ref, advantages=[ref.advantages[i] for i in order])
    if not ref.turn_advantages:
        return found
    turns = [_of_length(ref.turn_advantages[i], own) for i, own in zip(order, ref.turn_advantages, strict=True)]
    return msgspec.structs.replace(found, turn_advantages=turns)


def _of_length(given: list[float] | None, own: list[float] | None) -> list[float] | None:
    """Return `given` with as many turns as `own`: the last one is repeated, or further ones are left out."""
    if not given:
        return given
    n = len(given if own is None else own)
    return [given[min(k, len(given) - 1)] for k in range(n)]
