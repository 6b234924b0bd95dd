"""Leaves the heaviest samples out of a group that weighs more than its lease allows.

Guarantees that a group which fits is stored as it is, and that a sample is left out only if it weighs more than its
share of the lease; it is then named among the group's failed samples.
"""

from collections.abc import Callable

import msgspec

from lachesis.pipeline.environment.rollout import GroupDraft, sample_failure
from lachesis.schemas.codec import encode
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["leave_out_oversized"]


def leave_out_oversized(
    draft: GroupDraft, build: Callable[[GroupDraft], RolloutGroup], *, env: str, samples: int, largest: int
) -> tuple[GroupDraft, RolloutGroup, bytes]:
    """Return the draft, the group that `build` makes of it and its encoding, which may still be too large.

    `samples` and `largest`: of the group's lease, the most samples and bytes.
    """
    group = build(draft)
    data = encode(group)
    if len(data) <= largest or samples < 3:
        return draft, group, data
    places = range(len(draft.sessions))
    weights = [len(encode(build(draft.with_samples([place])))) for place in places]
    heaviest_first = sorted(places, key=lambda place: -weights[place])
    for n, place in enumerate(heaviest_first[:-2], 1):
        if weights[place] <= largest // samples:
            break
        left_out = heaviest_first[:n]
        failures = [
            sample_failure(
                draft.sessions[one],
                f"it weighs {weights[one]:,} bytes with {_tokens(draft, one):,} tokens, where the lease of its group "
                f"has {largest:,} bytes for {samples} samples; raise longest_tokens of environment {env}",
            )
            for one in left_out
        ]
        kept = draft.with_samples([one for one in places if one not in left_out])
        fewer = msgspec.structs.replace(
            kept, failures=sorted([*draft.failures, *failures], key=lambda failure: failure.sample)
        )
        group = build(fewer)
        data = encode(group)
        if len(data) <= largest:
            return fewer, group, data
    return draft, group, data


def _tokens(draft: GroupDraft, place: int) -> int:
    return sum(len(one.tokens) for one in draft.sessions[place].sequences)
