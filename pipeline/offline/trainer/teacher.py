"""Finds and checks the rollouts that an offline trainer is to train on, with the teacher's logprobs.

Guarantees that the rollouts it returns can be trained on: one that is gone, damaged, foreign or without logprobs is an
error that names the first such rollout, and how to do without.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.common.tokenizer_hash import same_tokens
from lachesis.pipeline.errors import LedgerError, NotFoundError
from lachesis.pipeline.offline.replay.results import RevisionResult
from lachesis.pipeline.offline.trainer.batch_former import OfflineGroup, without_logprobs
from lachesis.pipeline.retention.holds import read_record
from lachesis.pipeline.runtime.rollouts import read_rollout
from lachesis.schemas import subjects
from lachesis.schemas.annotations import TeacherLogprobs
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import DataError
from lachesis.schemas.planning_header import ROLLOUT_HEADER, Plan
from lachesis.schemas.replay import OfflineTrainerRecord
from lachesis.schemas.rollout import RolloutGroup
from lachesis.schemas.subjects import ROLLOUTS, TEACHER

__all__ = ["Progress", "WithTeacher", "attach_teacher", "validated"]

Progress = Callable[[int, int], None]
"""Called with how many rollouts were read, of how many."""

_DIGITS = 20
_REMEDY = 'Replay the others under another revision (--groups), or train without a teacher: batching.teacher = "off"'


class WithTeacher(NamedTuple):
    """A rollout under a revision, with the sequence of its logprobs by the teacher in TEACHER; None: there are none."""

    result: RevisionResult
    teacher: int | None


async def attach_teacher(
    bus: Bus, definition: OfflineTrainerRecord, live: str, wanted: Sequence[RevisionResult]
) -> list[WithTeacher]:
    """Return `wanted` with what the teacher of the revision `live` stored of each, if it is requested.

    Raises `NotFoundError` if the teacher's logprobs are required and missing.
    """
    if definition.teacher == "off":
        return [WithTeacher(result, None) for result in wanted]
    stored: dict[int, int] = {}
    kept = (await read_record(bus, definition.run)).trimmed.get(TEACHER, 1)  # what lies below may go at any moment
    filters = [subjects.logprobs(definition.run, live, env) for env in sorted({result.env for result in wanted})]
    async with bus.read(TEACHER, filters, start=kept, headers_only=True, follow=False) as messages:
        async for message in messages:
            rollout = message.headers.get(ROLLOUT_HEADER, "")
            if rollout.isdecimal() and len(rollout) < _DIGITS:
                stored.setdefault(int(rollout), message.seq)
    with_teacher = [WithTeacher(result, stored.get(result.seq) if _trains(result) else None) for result in wanted]
    missing = [one.result for one in with_teacher if one.teacher is None and _trains(one.result)]
    if missing and definition.teacher == "required":
        raise NotFoundError(
            f"{len(missing)} of {len(wanted)} groups have no logprobs of the teacher, group {missing[0].group} of "
            f"{missing[0].env} at sequence {missing[0].seq} of {ROLLOUTS} the first: it gave none, or they were "
            'trimmed. batching.teacher = "optional" trains on these without it'
        )
    return with_teacher


def _trains(result: RevisionResult) -> bool:
    return result.reward is not None and result.reward.trains


async def validated(
    bus: Bus, wanted: Sequence[WithTeacher], tokenizer_hash: str | None, progress: Progress, *, logprobs: bool = True
) -> AsyncIterator[OfflineGroup]:
    """Yield the rollouts, each once it is known that it can be trained on.

    Raises for the first one that cannot; if all that some lack is logprobs, at the end, with how many these are.
    Without `logprobs` those of the teacher are not read.
    """
    missing: list[RevisionResult] = []
    rollouts = [one.result.seq for one in wanted]
    teachers = [one.teacher for one in wanted if one.teacher is not None and logprobs]
    async with (
        aclosing(bus.fetch(ROLLOUTS, rollouts)) as messages,
        aclosing(bus.fetch(TEACHER, teachers)) as of_teacher,
    ):
        for done, (result, teacher) in enumerate(wanted):
            group = await _read(result, messages)
            assert result.reward is not None  # noqa: S101 - only those were selected
            if result.reward.trains:
                if tokenizer_hash is not None and not same_tokens(group.tokenizer_hash, tokenizer_hash):
                    raise DataError(
                        f"{_where(result)} was made with tokenizer {group.tokenizer_hash[:12]}, the model has "
                        f"{tokenizer_hash[:12]}: train the model that made it, or one of its checkpoints"
                    )
                if without_logprobs(group):
                    missing.append(result)
            if teacher is not None and logprobs:
                await _check_teacher(result, group, teacher, of_teacher)
            progress(done + 1, len(wanted))
            if not missing:
                yield OfflineGroup(result.seq, result.env, Plan.of(group), result.reward, teacher)
    if missing:
        raise DataError(
            f"{len(missing)} of {len(wanted)} groups have no logprobs, group {missing[0].group} of {missing[0].env} "
            f"at sequence {missing[0].seq} of {ROLLOUTS} the first: without what they were sampled with nothing "
            "corrects for the policy that made them. Replay the others under another revision (--env, --groups) and "
            "train on that"
        )


def _where(result: RevisionResult) -> str:
    return f"group {result.group} at sequence {result.seq} of {ROLLOUTS}"


async def _read(result: RevisionResult, messages: AsyncIterator[StoredMessage]) -> RolloutGroup:
    """Return the rollout that comes next, which is to be that of `result`."""
    try:
        group = read_rollout(await anext(messages)).group
    except NotFoundError as error:
        raise NotFoundError(
            f"{_where(result)} is gone, it was trimmed: select what is left (--min-step), or replay that under another "
            "revision"
        ) from error
    except DataError as error:
        raise DataError(f"{_where(result)} cannot be read any more: {error}") from error
    if group.id != result.group:
        raise LedgerError(f"{_where(result)} is {group.id} by now: the broker lost history that it had acknowledged")
    return group


async def _check_teacher(
    result: RevisionResult, group: RolloutGroup, teacher: int, messages: AsyncIterator[StoredMessage]
) -> None:
    """Raise `DataError` unless the teacher's logprobs that come next, at `teacher`, are those of `group`."""
    where = f"the teacher's logprobs of {_where(result)}, at {teacher} of {TEACHER},"
    try:
        logprobs = decode(TeacherLogprobs, (await anext(messages)).data)
    except (DataError, NotFoundError) as error:
        raise type(error)(f"{where} cannot be read any more: {error}. {_REMEDY}") from error
    if (logprobs.group, logprobs.n_tokens) != (group.id, group.sequences.n_tokens):
        raise DataError(f"{where} are of {logprobs.n_tokens} tokens of group {logprobs.group}. {_REMEDY}")
