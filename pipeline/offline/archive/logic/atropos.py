"""Lines of the files that Atropos environments write (`data_path_to_save_groups`, `process`).

One group each. Pure.

They are converted as the gateway converts what is posted to it. Nothing in a line names it, so its group's id is made
of its content: the same line is the same group, from whatever file it comes and however often.
"""

import hashlib
from pathlib import Path

import msgspec

from lachesis.pipeline.tasks.scored_data import ScoredData, read_json
from lachesis.pipeline.tasks.scored_groups import GroupOrigin, to_group
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["UNKNOWN_POLICY", "ImportAssumptions", "epoch_of", "from_line"]

UNKNOWN_POLICY = "0-imported-unknown"
"""Policy version of groups whose weights are unknown."""
PRODUCER = "import"


class ImportAssumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the file does not say: environment, weights, tokenizer and time. `longest` and `most` are the environment's
    and the run's bounds on tokens of a sequence and sequences of a group."""

    run: str
    env: str
    longest: int
    most: int
    policy_version: str = UNKNOWN_POLICY
    tokenizer_hash: str = "unknown"
    started_ns: int = 0


def from_line(data: bytes, number: int, file: Path, epoch: int, assumed: ImportAssumptions) -> RolloutGroup:
    """Return the group in line `number` of `file`. Raises `SchemaError`.

    `epoch` names the file, as a process's life is named elsewhere (`epoch_of` its first line).
    """
    scored = read_json(ScoredData, data)
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    origin = GroupOrigin(
        id=digest[:12]
        + "8"
        + digest[13:16]
        + "8"
        + digest[17:],  # version and variant of a UUID made by a rule of ours
        run=assumed.run,
        env=assumed.env,
        producer=PRODUCER,
        epoch=epoch,
        counter=number - 1,
        policy_version=assumed.policy_version,
        tokenizer_hash=assumed.tokenizer_hash,
        started_ns=assumed.started_ns,
        name=file.name,
        longest=assumed.longest,
        most=assumed.most,
        by="import",
        needs_logprobs=False,
    )
    return to_group(scored, origin)


def epoch_of(first: bytes) -> int:
    """Return what names a file by its first line, so that it stays the same when lines are added."""
    return int.from_bytes(hashlib.blake2b(first, digest_size=8).digest()) >> 1
