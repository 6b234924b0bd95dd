"""Chooses groups whose answers are rated for another task as well, and which task that is. Pure.

What raters still pay then is not for the task: the health check `task_blindness` watches it. The choice of groups is by
their ids, so every replica and every life of the scorer chooses the same ones; the other task is one that this process
saw before.
"""

import zlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from lachesis.pipeline.scorer.rater import Sample

__all__ = ["OtherTasks", "is_control"]

_MAX_TASKS = 8
"""Tasks of an environment that are remembered; each may be long."""


def is_control(group: str, share: float) -> bool:
    """Return whether a group is one of those that are rated for another task as well."""
    return zlib.crc32(group.encode()) < share * (1 << 32)


class OtherTasks:
    """The newest tasks of each environment, by item: a sample of each."""

    def __init__(self) -> None:
        self._newest: dict[str, OrderedDict[str, Sample]] = {}

    def remember(self, sample: Sample) -> None:
        """Remember the task of a sample, for groups to come."""
        newest = self._newest.setdefault(sample.env, OrderedDict())
        newest[sample.item] = sample
        newest.move_to_end(sample.item)
        if len(newest) > _MAX_TASKS:
            newest.popitem(last=False)

    def exchange(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples as answers to another task of their environment; none if no other one is known.

        It is the oldest of those whose data have least in common with their own, and never one with the same `answer`
        ("yes", "B"): what is right for both would seem to be paid for any task.
        """
        own = samples[0]
        others = [
            other for item, other in self._newest.get(own.env, {}).items()
            if item != own.item and not _have_one_answer(own, other)
        ]  # fmt: skip
        if not others:
            return []
        other = min(others, key=lambda other: _in_common(own, other))
        return [_as_answer_to(other, sample) for sample in samples]


def _have_one_answer(own: Sample, other: Sample) -> bool:
    answer = own.task.get("answer")
    return answer is not None and other.task.get("answer") == answer


def _in_common(own: Sample, other: Sample) -> int:
    return sum(key in other.task and other.task[key] == value for key, value in own.task.items())


def _as_answer_to(other: Sample, sample: Sample) -> Sample:
    before = list(other.messages[: _last_answer(other)])
    return msgspec.structs.replace(
        sample,
        prompt=other.prompt,
        messages=[*before, *sample.messages[_last_answer(sample) :]],
        task=other.task,
        item=other.item,
    )


def _last_answer(sample: Sample) -> int:
    places = (i for i in reversed(range(len(sample.messages))) if sample.messages[i].get("role") == "assistant")
    return next(places, len(sample.messages))
