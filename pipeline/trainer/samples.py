"""The samples of a batch as rows for people to read. Pure: no clock, no I/O."""

from collections.abc import Sequence
from typing import NamedTuple

from lachesis.schemas.annotations import TeacherLogprobs
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import GroupRef
from lachesis.schemas.rollout import Message, RolloutGroup

__all__ = ["ReadableSample", "readable_samples"]

_MAX_CHARACTERS = 8192


class ReadableSample(NamedTuple):
    """One sample of a batch, for people to read."""

    item: str
    prompt: str
    completion: str
    advantage: float | None

    def shortened(self) -> "ReadableSample":
        """Return it with texts of at most 8,192 characters: the middle of a longer one is left out, and said."""
        return self._replace(
            item=_shorten(self.item), prompt=_shorten(self.prompt), completion=_shorten(self.completion)
        )


def readable_samples(
    groups: Sequence[tuple[GroupRef, RolloutGroup, TeacherLogprobs | None]],
) -> list[ReadableSample]:
    """Return every sample with a known conversation; one whose text cannot be unpacked has none."""
    rows = []
    for ref, group, _ in groups:
        for conversation, advantage in zip(_conversations(group), ref.advantages, strict=False):
            *prompt, completion = [message.content for message in conversation] or [""]
            rows.append(ReadableSample(group.item, "\n".join(prompt), completion, advantage))
    return rows


def _conversations(group: RolloutGroup) -> list[list[Message]]:
    try:
        return group.with_texts().messages
    except SchemaError:
        return []


def _shorten(text: str) -> str:
    left_out = len(text) - _MAX_CHARACTERS
    half = _MAX_CHARACTERS // 2
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
