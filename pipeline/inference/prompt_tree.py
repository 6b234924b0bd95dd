"""Arranges prompts as a tree, so that tokens with which several begin are requested once. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from lachesis.pipeline.inference.protocol import PromptBranch
from lachesis.schemas.errors import DataError

__all__ = ["PromptPath", "branch_paths", "prompt_tree"]


class PromptPath(NamedTuple):
    """A path from the root of the tree to a leaf. Its first `shared` tokens are those of the path before it."""

    tokens: tuple[int, ...]
    shared: int = 0

    @property
    def own(self) -> tuple[int, ...]:
        """The tokens that the path before it does not have."""
        return self.tokens[self.shared :]


def prompt_tree(prompts: Iterable[tuple[int, ...]]) -> list[PromptPath]:
    """Return the prompts with which no other one begins, in ascending order.

    Each path shares at least as many tokens with the path before it as with any earlier one, and a prompt that is no
    leaf is the beginning of the first path that comes after it in that order.
    """
    leaves: list[tuple[int, ...]] = []
    for prompt in sorted(set(prompts)):
        if leaves and prompt[: len(leaves[-1])] == leaves[-1]:
            leaves.pop()
        leaves.append(prompt)
    shared = [0, *(_count_alike(*pair) for pair in pairwise(leaves))]
    return [PromptPath(leaf, n) for leaf, n in zip(leaves, shared, strict=False)]


def branch_paths(prompt: Sequence[int], branches: Iterable[PromptBranch], max_tokens: int) -> Iterator[PromptPath]:
    """Yield the path of each branch of a prompt.

    Raises `DataError` where a branch shares more tokens than the path before it has, or is longer than `max_tokens`.
    """
    before = tuple(prompt)
    for number, branch in enumerate(branches):
        if branch.shared > len(before):
            raise DataError(f"branches[{number}] shares {branch.shared} tokens of a prompt of {len(before)}.")
        if branch.shared + len(branch.token_ids) > max_tokens:
            raise DataError(
                f"branches[{number}] has {branch.shared + len(branch.token_ids)} tokens, and a context of {max_tokens} "
                "tokens holds no more than that."
            )
        before = (*before[: branch.shared], *branch.token_ids)
        yield PromptPath(before, branch.shared)


def _count_alike(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return with how many equal tokens both begin; neither is the beginning of the other."""
    return next(n for n, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs)
