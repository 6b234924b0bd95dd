"""The rollouts that a offline trainer is to train on: found with what the teacher gave for each, and checked.

Guarantees that what is handed out can be trained on: what is gone, damaged, without logprobs or another's is an error
that names the first rollout it is about, and how to do without.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from lachesis.pipeline.bus.api import Bus, Stored
from lachesis.pipeline.flow.retention import record
from lachesis.pipeline.replay.judged import Judged
from lachesis.pipeline.replay.logic.batches import PastGroup, without_logprobs
from lachesis.pipeline.stage.rollouts import read_rollout
from lachesis.schemas import subjects
from lachesis.schemas.annotations import TeacherLogprobs
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import DataError, LedgerError, NotFoundError
from lachesis.schemas.plan import ROLLOUT_HEADER, Plan
from lachesis.schemas.replay import PastRecord
from lachesis.schemas.rollout import RolloutGroup
from lachesis.schemas.subjects import ROLLOUTS, TEACHER

__all__ = ["Progress", "Taught", "checked", "taught_of"]

Progress = Callable[[int, int], None]
"""Told how many rollouts were read, of how many."""

_DIGITS = 20
_WITHOUT = 'Replay the others under another revision (--groups), or train without a teacher: batching.teacher = "off"'


class Taught(NamedTuple):
    """A rollout under a revision, with the sequence of its logprobs by the teacher in TEACHER; None: there are none."""

    judged: Judged
    teacher: int | None


async def taught_of(bus: Bus, asked: PastRecord, live: str, wanted: Sequence[Judged]) -> list[Taught]:
    """Return `wanted` with what the teacher of the revision `live` stored of each, where it is asked for.

    Raises `NotFoundError` where the teacher's logprobs are required and missing.
    """
    if asked.teacher == "off":
        return [Taught(judged, None) for judged in wanted]
    stored: dict[int, int] = {}
    kept = (await record(bus, asked.run)).trimmed.get(TEACHER, 1)  # what lies below may go at any moment
    filters = [subjects.logprobs(asked.run, live, env) for env in sorted({judged.env for judged in wanted})]
    async with bus.read(TEACHER, filters, start=kept, headers_only=True, follow=False) as messages:
        async for message in messages:
            rollout = message.headers.get(ROLLOUT_HEADER, "")
            if rollout.isdecimal() and len(rollout) < _DIGITS:
                stored.setdefault(int(rollout), message.seq)
    taught = [Taught(judged, stored.get(judged.seq) if _trains(judged) else None) for judged in wanted]
    bare = [one.judged for one in taught if one.teacher is None and _trains(one.judged)]
    if bare and asked.teacher == "required":
        raise NotFoundError(
            f"{len(bare)} of {len(wanted)} groups have no logprobs of the teacher, group {bare[0].group} of "
            f"{bare[0].env} at sequence {bare[0].seq} of {ROLLOUTS} the first: it gave none, or they were trimmed. "
            'batching.teacher = "optional" trains on these without it'
        )
    return taught


def _trains(judged: Judged) -> bool:
    return judged.reward is not None and judged.reward.trains


async def checked(
    bus: Bus, wanted: Sequence[Taught], tokenizer_hash: str | None, progress: Progress, *, logprobs: bool = True
) -> AsyncIterator[PastGroup]:
    """Yield the rollouts that can be trained on; raise for the first one that cannot once all were looked at.

    Without `logprobs` those of the teacher are not looked at.
    """
    bare: list[Judged] = []
    rollouts = [one.judged.seq for one in wanted]
    teachers = [one.teacher for one in wanted if one.teacher is not None and logprobs]
    async with aclosing(bus.fetch(ROLLOUTS, rollouts)) as messages, aclosing(bus.fetch(TEACHER, teachers)) as taught:
        for done, (judged, teacher) in enumerate(wanted):
            group = await _read(judged, messages)
            assert judged.reward is not None  # noqa: S101 - only those were selected
            if judged.reward.trains:
                if tokenizer_hash is not None and group.tokenizer_hash != tokenizer_hash:
                    raise DataError(
                        f"{_where(judged)} was made with tokenizer {group.tokenizer_hash[:12]}, the model has "
                        f"{tokenizer_hash[:12]}: train the model that made it, or one of its checkpoints"
                    )
                if without_logprobs(group):
                    bare.append(judged)
            if teacher is not None and logprobs:
                await _check_taught(judged, group, teacher, taught)
            progress(done + 1, len(wanted))
            if not bare:
                yield PastGroup(judged.seq, judged.env, Plan.of(group), judged.reward, teacher)
    if bare:
        raise DataError(
            f"{len(bare)} of {len(wanted)} groups have no logprobs, group {bare[0].group} of {bare[0].env} at sequence "
            f"{bare[0].seq} of {ROLLOUTS} the first: without what they were sampled with nothing corrects for the "
            "policy that made them. Replay the others under another revision (--env, --groups) and train on that"
        )


def _where(judged: Judged) -> str:
    return f"group {judged.group} at sequence {judged.seq} of {ROLLOUTS}"


async def _read(judged: Judged, messages: AsyncIterator[Stored]) -> RolloutGroup:
    """Return the rollout that comes next, which is to be `judged`."""
    try:
        group = read_rollout(await anext(messages)).group
    except NotFoundError as error:
        raise NotFoundError(
            f"{_where(judged)} is gone, it was trimmed: select what is left (--min-step), or replay that under another "
            "revision"
        ) from error
    except DataError as error:
        raise DataError(f"{_where(judged)} cannot be read any more: {error}") from error
    if group.id != judged.group:
        raise LedgerError(f"{_where(judged)} is {group.id} by now: the broker lost history that it had acknowledged")
    return group


async def _check_taught(judged: Judged, group: RolloutGroup, teacher: int, messages: AsyncIterator[Stored]) -> None:
    """Raise `DataError` unless the teacher's logprobs that come next, at `teacher`, are those of `group`."""
    where = f"the teacher's logprobs of {_where(judged)}, at {teacher} of {TEACHER},"
    try:
        logprobs = decode(TeacherLogprobs, (await anext(messages)).data)
    except (DataError, NotFoundError) as error:
        raise type(error)(f"{where} cannot be read any more: {error}. {_WITHOUT}") from error
    if (logprobs.group, logprobs.n_tokens) != (group.id, group.sequences.n_tokens):
        raise DataError(f"{where} are of {logprobs.n_tokens} tokens of group {logprobs.group}. {_WITHOUT}")
