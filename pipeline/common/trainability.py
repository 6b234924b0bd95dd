"""Decides whether a trainer can use a rollout group. Pure.

One rule serves the edges that take groups in and the trainer itself. An edge refuses what it can know; a bad group that
still reaches a trainer costs only itself, never a batch.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from lachesis.pipeline.common.sampling_agreement import MASK_COLUMN, sampling_difference
from lachesis.pipeline.common.tokenizer_hash import same_tokens
from lachesis.schemas.columns import view
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.rollout import RolloutGroup, Sequences
from lachesis.schemas.sequences import TEACHER_COLUMN

__all__ = ["TEXT_ALONE", "TrainerLimits", "TrainerReads", "why_nothing_to_train", "why_untrainable"]

_MAX_QUOTED_CHARS = 80
"""Characters of a foreign tokenizer's hash or column's name that a reason repeats."""


class TrainerReads(NamedTuple):
    """What a trainer reads in addition to text tokens: further columns by name, and attachments."""

    columns: frozenset[str] = frozenset()
    attachments: bool = False


TEXT_ALONE: Final = TrainerReads()
"""Neither: the trainer of a run that sets no `training.inputs`, and the packed tensors of `lachesis.batches`."""


class TrainerLimits(NamedTuple):
    """What a trainer can read. `tokenizer_hash` and `vocabulary` (the number of token ids) are None where unknown.

    `reads`: what it reads in addition to text tokens. None: whole groups, as a trainer of one's own may. `temperature`:
    what it divides logits by; None: not known, so how a group was sampled is not compared. `truncated`: whether it
    trains on samples that were cut off at their length limit.
    """

    tokenizer_hash: str | None = None
    vocabulary: int | None = None
    reads: TrainerReads | None = TEXT_ALONE
    temperature: float | None = None
    truncated: bool = True

    @classmethod
    def of(
        cls, policy: PolicyRecord | None, reads: TrainerReads | None, temperature: float | None = None
    ) -> TrainerLimits:
        """Return the limits that the run's policy record states."""
        if policy is None:
            return cls(reads=reads, temperature=temperature)
        return cls(policy.tokenizer_hash, policy.vocabulary, reads, temperature)


def why_untrainable(group: RolloutGroup, limits: TrainerLimits) -> str | None:
    """Return why a trainer with these limits cannot use `group`, None if it can.

    The columns have been checked.

    The reason does not name the group, so that groups with the same fault give the same text.
    """
    if limits.tokenizer_hash is not None and not same_tokens(group.tokenizer_hash, limits.tokenizer_hash):
        return (
            f"tokenizer {group.tokenizer_hash[:12]!r} is not the trainer's, {limits.tokenizer_hash[:12]!r}; rollouts "
            "and trainer must use the same"
        )
    if limits.reads is not None:
        held = _unread(group, limits.reads)
        if held:
            return (
                f"{held}: this run's trainer reads {_named(limits.reads)} and would train without; leave it out, or "
                "name in training.inputs what gives it to the model"
            )
    if group.sequences.turn_rewards is not None and (reason := _why_no_turns(group.sequences)) is not None:
        return reason
    if limits.temperature is not None:
        masked = limits.reads is not None and MASK_COLUMN in limits.reads.columns & group.sequences.columns.keys()
        difference = sampling_difference(group.generation, limits.temperature, masked=masked)
        if difference is not None:
            return difference
    return None if limits.vocabulary is None else _unknown_token(group, limits.vocabulary)


def why_nothing_to_train(group: RolloutGroup) -> str | None:
    """Return why there is nothing to train on in `group` whatever the trainer, None if there is."""
    sequences = group.sequences
    if any(length and i not in sequences.excluded_samples for i, length in enumerate(sequences.lengths)):
        return None
    if sequences.excluded_samples:
        return "nothing to train on: its environment excludes every sample (set_advantage_to_zero)"
    return "nothing to train on: the loss mask lets in no token"


def _unread(group: RolloutGroup, reads: TrainerReads) -> str:
    """Return what of the group is not read, "" if all is."""
    sequences = group.sequences
    held = ["attachments"] * (bool(group.attachments) and not reads.attachments)
    known = _trained_or_needless(sequences) | reads.columns
    held += [name[:_MAX_QUOTED_CHARS] for name in sorted(set(sequences.columns) - known)]
    return ", ".join(held[:8]) + (f" and {len(held) - 8} more" if len(held) > 8 else "")


def _why_no_turns(sequences: Sequences) -> str | None:
    """Return why the rewards of turns cannot be credited to tokens, None if they can."""
    if sequences.token_advantages is not None:
        return "turn_rewards and token_advantages: both say what each token is credited with; give one of them"
    try:
        sequences.turns()
    except SchemaError as error:
        return str(error)
    return None


def _named(reads: TrainerReads) -> str:
    further = [*sorted(reads.columns), *["attachments"] * reads.attachments]
    return f"text tokens and {', '.join(further)} alone" if further else "text tokens alone"


def _trained_or_needless(sequences: Sequences) -> set[str]:
    """Return the columns that a trainer of text reads, or does without: it computes a reference model's itself."""
    alternatives = {"distill_token_ids", "distill_logprobs"} if TEACHER_COLUMN in sequences.columns else set()
    return {TEACHER_COLUMN, "ref_logprobs", *alternatives}


def _unknown_token(group: RolloutGroup, vocabulary: int) -> str | None:
    sequences = group.sequences
    tokens = view(sequences.tokens, "int32", sequences.n_tokens, "tokens")
    highest = int(tokens.max())
    if highest < vocabulary:
        return None
    at = int(np.argmax(tokens >= vocabulary))
    sequence = int(np.searchsorted(sequences.cuts(), at, side="right")) - 1
    return (
        f"token id {int(tokens[at])} in sequence {sequence} is none of the {vocabulary} that the model knows; rollouts "
        "and trainer must use the same tokenizer"
    )
