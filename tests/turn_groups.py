"""A group with rewards of its turns, and its reference in a batch."""

import msgspec
import numpy as np

from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ledger import GroupRef
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import RolloutGroup, Sequences, VersionSpan

SUB_AGENT = ([1, 2, 3], [0, 1, 1])
FORKED = ([1, 4, 5, 6, 7], [0, 1, 0, 1, 1])
SHORT = ([1, 8], [0, 1])
"""Sequences as (tokens, mask). Those of the first sample in time: FORKED first turn, SUB_AGENT, FORKED second turn."""


def group(**columns):
    flat = [SUB_AGENT, FORKED, SHORT]
    masks = np.concatenate([np.array(mask, np.bool_) for _, mask in flat])
    sequences = Sequences(
        offsets=as_bytes(np.cumsum([0, *(len(tokens) for tokens, _ in flat)]), "int32"),
        tokens=as_bytes([token for tokens, _ in flat for token in tokens], "int32"),
        loss_mask=pack_mask(masks), logprobs=as_bytes(np.where(masks, -1.0, 0.0), "float32"),
        finish_reasons=["stop"] * 3, version_spans=[VersionSpan(i, 0, 0) for i in range(3)], sample_index=[0, 0, 1],
        rewards={"r": [0.0, 0.0]}, turn_rewards=[[1.0, 2.0, 4.0], [0.0]], turn_order=[[1, 0, 2], [0]],
    )  # fmt: skip
    made = RolloutGroup(
        id="b" * 32, run="r", env="e", item="i", producer="p", epoch=1, counter=1, policy_versions=["1-lin-abcd"],
        sequences=msgspec.structs.replace(sequences, **columns), tokenizer_hash="0" * 64, started_ns=1,
    )  # fmt: skip
    made.check()
    return made


def ref(**changes):
    made = GroupRef(group="b" * 32, seq=1, env="e", sequences=2, tokens=10, policy_step=1, advantages=[0.5, -0.5],
                    turn_advantages=[[10.0, 20.0, 40.0], [-1.0]])  # fmt: skip
    return msgspec.structs.replace(made, **changes)
