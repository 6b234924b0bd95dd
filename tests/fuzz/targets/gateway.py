"""What Atropos environments send: bodies, gzip or not, and scored groups in JSON.

A group that is taken must come back equal from the wire, and be one that readers accept.
"""

import random
import zlib

import msgspec
import numpy as np
from fuzz.mutate import mutate_bytes, mutate_json
from fuzz.oracle import Target

from lachesis.pipeline.extensions.atropos.gateway.body import unzipped
from lachesis.pipeline.extensions.atropos.gateway.protocol import EnvironmentId, RegisterEnv
from lachesis.pipeline.extensions.atropos.logic.scored_data import read_json, read_scored_data
from lachesis.pipeline.extensions.atropos.logic.scored_groups import GroupOrigin, to_group
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.planning_header import Plan
from lachesis.schemas.rollout import RolloutGroup
from lachesis.schemas.sequences import TEACHER_COLUMN

__all__ = ["targets"]

_LIMIT = 1 << 16
_ORIGIN = GroupOrigin(
    id="ab" * 16, run="fuzz", env="words", producer="gateway-words-1", epoch=1, counter=1,
    policy_version="3-first-abcdef", tokenizer_hash="t", started_ns=1, name="words", longest=8, most=4,
)  # fmt: skip
_PLAIN = {
    "tokens": [[5, 6, 7], [5, 8]], "masks": [[-100, 6, 7], [-100, 8]], "scores": [1.0, 0.0],
    "inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -2.0]], "env_id": 0,
}  # fmt: skip
_FULL = {
    **_PLAIN,
    "advantages": [[0.0, 0.5, 0.5], [0.0, -0.5]],
    "ref_logprobs": [[0.0, -0.4, -0.2], [0.0, -1.5]],
    "messages": [
        [{"role": "user", "content": "5"}, {"role": "assistant", "content": "67", "tool_calls": [
            {"id": "a", "function": {"name": "add", "arguments": {"x": 1}}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "5"}]}, {"role": "assistant", "content": "8"}],
    ],
    "generation_params": {"temperature": 1.0},
    "overrides": [{}, {"set_advantage_to_zero": True}],
    "group_overrides": {"group_filter": False},
    "distill_token_ids": [[[], [6], [7, 1]], [[], [8]]],
    "distill_logprobs": [[[], [-0.1], [-0.2, -2.0]], [[], [-0.3]]],
}  # fmt: skip
_REGISTRATION = {"max_token_length": 64, "desired_name": "words", "weight": 1.0, "group_size": 4}


def targets() -> list[Target]:
    """Return the targets."""
    groups = [msgspec.json.encode(value) for value in (_PLAIN, _FULL)]
    request = [msgspec.json.encode(value) for value in (_REGISTRATION, {"env_id": 3})]
    return [
        Target("gateway.group", groups, mutate_json, _take_group, weight=3),
        Target("gateway.registration", request, mutate_json, _take_registration),
        Target("gateway.gzip", [_zipped(body) for body in groups], _mutate_zipped, _unzip),
    ]


def _take_group(data: bytes) -> None:
    group = to_group(read_scored_data(data), _ORIGIN)
    again = decode(RolloutGroup, encode(group))
    again.check()
    assert encode(again) == encode(group)
    assert Plan.unpack(Plan.of(group).pack()) == Plan.of(group)
    for name, column in again.sequences.columns.items():
        if column.dtype == "float32":
            numbers = np.frombuffer(column.data, np.float32)
            missing = np.isnan(numbers) if name == TEACHER_COLUMN else np.zeros(len(numbers), bool)
            assert (np.isfinite(numbers) | missing).all(), "a number is not finite"
    assert all(len(sequence.tokens) <= _ORIGIN.longest for sequence in again.sequences)


def _take_registration(data: bytes) -> None:
    kind = EnvironmentId if b"env_id" in data else RegisterEnv
    read_json(kind, data)


def _unzip(data: bytes) -> None:
    assert len(unzipped(data, _LIMIT)) <= _LIMIT


def _zipped(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(body) + packer.flush()


def _mutate_zipped(rng: random.Random, good: bytes) -> bytes:
    """Damage what is packed, or pack a great deal of the same."""
    return mutate_bytes(rng, good) if rng.random() < 0.8 else _zipped(bytes(rng.randrange(4 * _LIMIT)))
