"""Groups with columns and attachments, selected and packed as the trainer does it."""

import numpy as np

from lachesis.pipeline.common.trainability import TrainerLimits, TrainerReads
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.sequences import select_trainable
from lachesis.schemas.columns import Column, as_bytes
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import GroupRef
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import Message, RolloutGroup
from lachesis.schemas.sequences import Sequences, VersionSpan

PROMPT = 3


def group(tokens, logprobs, columns=None, *, attachments=(), messages=(), prompt=PROMPT):
    """A group of sequences of token ids; the first `prompt` tokens of each are not trained on."""
    lengths = [len(one) for one in tokens]
    mask = np.concatenate([np.arange(length) >= prompt for length in lengths])
    return RolloutGroup(
        id=new_group_id(),
        run="r",
        env="e",
        item="i",
        producer="p",
        epoch=1,
        counter=1,
        policy_versions=["0-a-b"],
        sequences=Sequences(
            offsets=as_bytes(np.cumsum([0, *lengths]), "int32"),
            tokens=as_bytes(np.concatenate(tokens), "int32"),
            loss_mask=pack_mask(mask),
            logprobs=as_bytes(np.where(mask, np.concatenate(logprobs), 0), "float32"),
            finish_reasons=["stop"] * len(tokens),
            version_spans=[VersionSpan(i, 0, 0) for i in range(len(tokens))],
            columns={
                name: Column(dtype=dtype, data=as_bytes(values, dtype), width=values.shape[1])
                for name, (values, dtype) in (columns or {}).items()
            },
        ),
        tokenizer_hash="t",
        started_ns=1,
        messages=[[Message(role="user", content="?", attachments=list(named))] for named in messages],
        attachments=list(attachments),
    )


def selected(groups, inputs, *, columns=(), attachments=False):
    """What a trainer that reads this makes of the groups."""
    payloads = []
    for seq, one in enumerate(groups, 1):
        advantages = [1.0 if i % 2 else -1.0 for i in range(one.sequences.n_samples)]
        ref = GroupRef(group=one.id, seq=seq, env="e", sequences=len(one.sequences), tokens=one.sequences.n_tokens,
                       policy_step=0, advantages=advantages)  # fmt: skip
        payloads.append((ref, one, None))
    limits = TrainerLimits("t", None, TrainerReads(frozenset(columns), attachments))
    return select_trainable(payloads, limits, inputs=inputs)


def packed(groups, inputs, **reads):
    found = selected(groups, inputs, **reads)
    assert not found.dropped
    return pack(found.sequences)
