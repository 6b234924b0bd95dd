"""From the teacher's answers, one a sequence, to the arrays of a group. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import DataError
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["group_logprobs"]


def group_logprobs(group: RolloutGroup, answers: Sequence[NDArray[np.float32] | None]) -> tuple[bytes, list[int]]:
    """Return the logprobs float32 [T] of a group as bytes, and the sequences without any.

    `answers` holds for each sequence float32 [its tokens], of token t given those before it, or None where the teacher
    failed; those positions are 0, as is every first one. Raises `DataError` on a wrong length or a value that is not
    finite.
    """
    cuts = group.sequences.cuts()
    logprobs = np.zeros(group.sequences.n_tokens, np.float32)
    missing = []
    for i, answer in enumerate(answers):
        start, stop = int(cuts[i]), int(cuts[i + 1])
        if answer is None:
            missing.append(i)
            continue
        if answer.shape != (stop - start,) or not np.isfinite(answer).all():
            raise DataError(
                f"group {group.id}, sequence {i}: {answer.shape} teacher logprobs for {stop - start} tokens"
            )
        logprobs[start + 1 : stop] = answer[1:]
    return as_bytes(logprobs, "float32"), missing
