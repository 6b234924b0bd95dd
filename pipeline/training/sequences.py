"""From a batch's groups to training sequences: which tokens, which advantage, which teacher logprobs.

Pure. A sample whose advantage is None is left out. Guarantees that what this trainer cannot use is refused
(`UnsupportedError`), never dropped in silence.
"""

from __future__ import annotations

import msgspec
import numpy as np

from lachesis.pipeline.training.batch import TrainingSequence
from lachesis.schemas.annotations import TeacherLogprobs
from lachesis.schemas.errors import DataError, UnsupportedError
from lachesis.schemas.ledger import GroupRef
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["shuffled", "training_sequences"]


def training_sequences(
    ref: GroupRef, group: RolloutGroup, teacher: TeacherLogprobs | None, *, tokenizer_hash: str
) -> list[TrainingSequence]:
    """Return the sequences of one group.

    Raises `DataError` when the group was made with another tokenizer or does not fit its advantages or its teacher
    arrays, `UnsupportedError` when it holds attachments or per-token columns, which a text policy has no use for, or
    no logprobs.
    """
    if group.tokenizer_hash != tokenizer_hash:
        raise DataError(f"group {group.id}: tokenizer {group.tokenizer_hash[:12]} is not ours, {tokenizer_hash[:12]}")
    if group.attachments or group.sequences.columns:
        held = ["attachments"] * bool(group.attachments) + sorted(group.sequences.columns)
        raise UnsupportedError(f"group {group.id} holds {', '.join(held)}; this trainer reads text tokens alone")
    if len(ref.advantages) != group.sequences.n_samples:
        raise DataError(f"group {group.id}: {len(ref.advantages)} advantages for {group.sequences.n_samples} samples")
    if teacher is not None and teacher.n_tokens != group.sequences.n_tokens:
        raise DataError(f"group {group.id}: {teacher.n_tokens} teacher logprobs for {group.sequences.n_tokens} tokens")
    teacher_values = None if teacher is None else teacher.values()
    cuts = group.sequences.cuts()
    samples = group.sequences.sample_index or range(len(group.sequences))
    found = []
    for i, (sequence, sample) in enumerate(zip(group.sequences, samples, strict=True)):
        advantage = ref.advantages[sample]
        if advantage is None or not sequence.loss_mask.any():
            continue
        if sequence.logprobs is None:
            raise UnsupportedError(
                f"group {group.id} has no logprobs, which tell the policy that made it from this one"
            )
        has_teacher = teacher is not None and i not in teacher.missing
        found.append(
            TrainingSequence(
                tokens=sequence.tokens,
                loss_mask=sequence.loss_mask,
                logprobs=sequence.logprobs,
                advantage=advantage if sequence.token_advantages is None else sequence.token_advantages,
                teacher_logprobs=teacher_values[cuts[i] : cuts[i + 1]]
                if has_teacher and teacher_values is not None
                else None,
                group_id=group.id,
                policy_step=ref.policy_step,
            )
        )
    return found


def shuffled(ref: GroupRef, seed: int) -> GroupRef:
    """Return the reference with its advantages shuffled among the samples: a control from which nothing can be learned.

    The order depends on the seed and the group alone.
    """
    rng = np.random.default_rng([seed, int(ref.group, 16)])
    order = rng.permutation(len(ref.advantages))
    return msgspec.structs.replace(ref, advantages=[ref.advantages[i] for i in order])
