"""Lines of the files that Atropos environments write (`data_path_to_save_groups`, `process`).

One group each. Pure.

They are converted as the gateway converts what is posted to it. Nothing in a line names it, so its group's id is made
of its content: the same line is the same group, from whatever file it comes and however often.
"""

import hashlib
from pathlib import Path

from lachesis.pipeline.extensions.atropos.logic.scored_data import read_scored_data
from lachesis.pipeline.extensions.atropos.logic.scored_groups import GroupOrigin, to_group
from lachesis.pipeline.offline.archive.logic.foreign_lines import PRODUCER, ImportAssumptions
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["from_line"]


def from_line(data: bytes, number: int, file: Path, epoch: int, assumed: ImportAssumptions) -> RolloutGroup:
    """Return the group in line `number` of `file`. Raises `SchemaError`.

    `epoch` names the file, as a process's life is named elsewhere (`epoch_of` its first line).
    """
    scored = read_scored_data(data)
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
