"""Measures the lengths of groups that are trained and of groups that are dropped as stale. Pure.

With `batching.staleness_of = "oldest"` a group is as old as the policy that sampled its first tokens, so a group that
takes long is old when it arrives. If answers differ in length, the long ones are dropped first, and the policy learns
from the short ones. By default a group is as old as the policy that sampled its last tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from lachesis.pipeline.batcher.join import PendingRollout
from lachesis.schemas.ledger import GroupRef

__all__ = ["RecentLengths", "stale_lengths"]

_RECENT_GROUPS = 1024


def stale_lengths(settled: Iterable[PendingRollout]) -> dict[str, list[int]]:
    """Return, by environment, the mean tokens per sample of each stale rollout in `settled`."""
    found: dict[str, list[int]] = {}
    for member in settled:
        if member.outcome is not None and member.outcome.kind == "stale" and member.plan is not None:
            found.setdefault(member.env, []).append(round(member.plan.tokens / member.plan.samples))
    return found


class RecentLengths:
    """Tokens of a sample, prompt included, over the last 1,024 groups of each kind."""

    def __init__(self) -> None:
        self._batched: deque[float] = deque(maxlen=_RECENT_GROUPS)
        self._stale: deque[float] = deque(maxlen=_RECENT_GROUPS)

    def record_entry(self, batched: Iterable[GroupRef], stale: dict[str, list[int]]) -> None:
        """Add an entry's groups."""
        self._batched.extend(ref.tokens / ref.sequences for ref in batched if ref.sequences)
        for lengths in stale.values():
            self._stale.extend(lengths)

    def figures(self) -> dict[str, float]:
        """Return the mean lengths under the names of metrics; a kind without groups is left out."""
        kinds = {
            "batching/tokens_per_sequence/batched": self._batched,
            "batching/tokens_per_sequence/stale": self._stale,
            "batching/tokens_per_sequence/generated": [*self._batched, *self._stale],
        }
        return {name: sum(lengths) / len(lengths) for name, lengths in kinds.items() if lengths}
