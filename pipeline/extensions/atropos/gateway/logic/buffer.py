"""Holds groups smaller than their environment's group size until others make it up. Pure.

Guarantees that no more than `limit` bytes wait, and that a group which could never leave does not enter.
"""

from collections.abc import Iterable, Sequence

import msgspec

__all__ = ["Buffer", "PartialGroup", "summing_to"]


class PartialGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that waits: `digest` names what the client `owner` sent, `data` is the encoded rollout group.

    `leaving`: it was chosen, and has the counter under which it is published, once or again.
    """

    owner: int
    digest: str
    sequences: int
    data: bytes
    leaving: bool = False


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """What waits in one environment of the run, oldest first; each registered client is complete by itself."""

    waiting: list[PartialGroup] = []

    def __contains__(self, digest: str) -> bool:
        return any(partial.digest == digest for partial in self.waiting)

    def of(self, owner: int) -> list[PartialGroup]:
        return [partial for partial in self.waiting if partial.owner == owner]

    def sequences(self, owner: int) -> int:
        return sum(partial.sequences for partial in self.of(owner))

    def has_room(self, size: int, limit: int) -> bool:
        """Return whether a group of `size` bytes fits."""
        return size + sum(len(partial.data) for partial in self.waiting) <= limit

    def plus(self, partial: PartialGroup) -> "Buffer":
        return Buffer(waiting=[*self.waiting, partial])

    def minus(self, gone: Iterable[PartialGroup]) -> "Buffer":
        digests = {partial.digest for partial in gone}
        return Buffer(waiting=[partial for partial in self.waiting if partial.digest not in digests])

    def replaced(self, changed: Iterable[PartialGroup]) -> "Buffer":
        by_digest = {partial.digest: partial for partial in changed}
        return Buffer(waiting=[by_digest.get(partial.digest, partial) for partial in self.waiting])

    def complete(self, owner: int, group_size: int) -> list[PartialGroup]:
        """Return those of `owner` that make up `group_size`, oldest first; none where no subset does.

        Those that were chosen before, by a gateway that died over it, come first.
        """
        own = self.of(owner)
        leaving = [partial for partial in own if partial.leaving]
        return leaving or [own[i] for i in summing_to([partial.sequences for partial in own], group_size)]


def summing_to(sizes: Sequence[int], target: int) -> list[int]:
    """Return ascending indexes of positive `sizes` that sum exactly to `target`, early ones first.

    [] if none do.
    """
    reached: dict[int, list[int]] = {0: []}
    for i, size in enumerate(sizes):
        for total, chosen in sorted(reached.items(), reverse=True):
            if total + size <= target:
                reached.setdefault(total + size, [*chosen, i])
        if target in reached:
            return reached[target]
    return []
