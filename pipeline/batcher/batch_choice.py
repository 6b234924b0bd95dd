"""Chooses the groups of a batch: an exact number of sequences, within a token budget, no group split.

Returns the chosen ones of the ready groups, or None if no choice fills the batch. Guarantees that a choice is found if
there is one, so no group blocks those behind it; that of all choices the one with the earliest groups is taken
(compared group by group in order of precedence); and that the same groups always give the same choice. Precedence is
age or, with a mix of environments, a weighted turn of each.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.ledger import GroupRef

__all__ = ["choose_batch", "precedence"]

_MAX_GROUPS_WEIGHED = 2048
"""Groups weighed against each other at once. Groups before them are taken in order as long as they fit; if all groups
have one size, nothing else happens. With more groups of several sizes, a choice may be missed."""
_CELLS = 1 << 24
_UNREACHABLE = np.iinfo(np.int64).max // 2
"""Tokens of a number of sequences that no choice of groups makes up: more than any budget."""


def choose_batch(
    groups: Sequence[GroupRef],
    batch_size: int,
    *,
    token_budget: int | None = None,
    mix: Mapping[str, float] | None = None,
    incomplete: bool = False,
) -> list[GroupRef] | None:
    """Return groups of `batch_size` sequences in all and at most `token_budget` tokens, or None.

    With `incomplete`, the largest number of sequences that can be reached is enough. No group may have more sequences
    than `batch_size`, or more tokens than the budget.
    """
    if not incomplete and sum(ref.sequences for ref in groups) < batch_size:
        return None
    budget = math.inf if token_budget is None else token_budget
    ordered = [groups[i] for i in precedence(groups, mix or {})]
    chosen, missing, _ = _first_fit(ordered, batch_size, budget)
    if missing == 0:
        return chosen
    ordered = _thin(ordered, batch_size, by_tokens=token_budget is not None)
    split = max(0, len(ordered) - min(_MAX_GROUPS_WEIGHED, _CELLS // (batch_size + 1)))
    chosen, missing, budget = _first_fit(ordered[:split], batch_size, budget)
    more = _choose_by_table(ordered[split:], missing, budget)
    left = missing - sum(ref.sequences for ref in more)
    chosen += more
    return chosen if chosen and (incomplete or left == 0) else None


def _first_fit(ordered: Sequence[GroupRef], sequences: int, tokens: float) -> tuple[list[GroupRef], int, float]:
    """Take each group that still fits; return them and the remaining `sequences` and `tokens`.

    If no `sequences` remain, no choice has earlier groups.
    """
    chosen = []
    for ref in ordered:
        if ref.sequences <= sequences and ref.tokens <= tokens:
            chosen.append(ref)
            sequences, tokens = sequences - ref.sequences, tokens - ref.tokens
    return chosen, sequences, tokens


def _choose_by_table(ordered: Sequence[GroupRef], sequences: int, budget: float) -> list[GroupRef]:
    """Return the earliest groups that make up as many of `sequences` as the budget allows."""
    if not ordered:
        return []
    unit = math.gcd(*(ref.sequences for ref in ordered))  # groups of one size make a table of few columns
    sizes = [ref.sequences // unit for ref in ordered]
    fewest = _fewest_tokens(sizes, [ref.tokens for ref in ordered], sequences // unit)
    target = int(np.flatnonzero(fewest[0] <= min(budget, _UNREACHABLE - 1))[-1])
    chosen = []
    for i, ref in enumerate(ordered):
        rest = target - sizes[i]
        if rest >= 0 and fewest[i + 1, rest] <= min(budget - ref.tokens, _UNREACHABLE - 1):
            chosen.append(ref)
            target, budget = rest, budget - ref.tokens
    return chosen


def _fewest_tokens(sizes: Sequence[int], tokens: Sequence[int], most: int) -> NDArray[np.int64]:
    """Return int64 [n + 1, most + 1]: the fewest tokens with which groups i.. make up exactly s sequences."""
    fewest = np.full((len(sizes) + 1, most + 1), _UNREACHABLE, np.int64)
    fewest[len(sizes), 0] = 0
    for i in range(len(sizes) - 1, -1, -1):
        fewest[i] = fewest[i + 1]
        if sizes[i] <= most:
            with_it = fewest[i + 1, : most + 1 - sizes[i]] + tokens[i]
            np.minimum(fewest[i, sizes[i] :], with_it, out=fewest[i, sizes[i] :])
    return fewest


def _thin(ordered: Sequence[GroupRef], batch_size: int, *, by_tokens: bool) -> list[GroupRef]:
    """Drop groups that cannot be needed: a batch holds only so many groups of each size.

    Without a token budget this changes no choice. With a budget, the first and the lightest groups of each size are
    kept, and groups are dropped only if there are more than `_MAX_GROUPS_WEIGHED`. A choice is then still found if
    there is one, but may have later groups.
    """
    if by_tokens and len(ordered) <= _MAX_GROUPS_WEIGHED:
        return list(ordered)
    by_size: dict[int, list[int]] = {}
    for i, ref in enumerate(ordered):
        by_size.setdefault(ref.sequences, []).append(i)
    kept: set[int] = set()
    for size, indexes in by_size.items():
        fit = batch_size // size
        kept.update(indexes[:fit])
        if by_tokens:
            kept.update(sorted(indexes, key=lambda i: ordered[i].tokens)[:fit])
    return [ordered[i] for i in sorted(kept)]


def precedence(groups: Sequence[GroupRef], mix: Mapping[str, float]) -> list[int]:
    """Return the indexes of `groups` in the order in which they should be taken.

    Without a mix the oldest come first. With a mix, the next group is from the environment with the fewest sequences so
    far, divided by its weight (1 if `mix` does not name it). So each environment gets its share of the batch to within
    one group; an environment without a ready group is skipped.
    """
    oldest_first = sorted(range(len(groups)), key=lambda i: groups[i].seq)
    if not mix:
        return oldest_first
    turns: list[tuple[float, int, int]] = []
    had: dict[str, int] = {}
    for i in oldest_first:
        ref = groups[i]
        before = had.get(ref.env, 0)
        turns.append((before / mix.get(ref.env, 1.0), ref.seq, i))
        had[ref.env] = before + ref.sequences
    return [i for _, _, i in sorted(turns)]
