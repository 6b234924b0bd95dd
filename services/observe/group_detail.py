"""Reads one group with its samples, tokens and trace, and what other revisions say of it.

Returns for a group's id a `GroupDetail`, bounded in tokens, revisions and time, in which None means "not known" or
"there is none".
"""

from collections.abc import Iterator
from contextlib import aclosing
from itertools import islice

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.token_credit import credit_by_turn
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.runtime.rollouts import read_rollout
from lachesis.schemas import subjects
from lachesis.schemas.annotations import GroupReward, GroupScore, TeacherLogprobs
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import DataError, SchemaError
from lachesis.schemas.replay import RescoreEvent
from lachesis.schemas.rollout import RolloutGroup, Sequences
from lachesis.services.observe.find import find_rollout
from lachesis.services.observe.groups import MAX_SAMPLES, GroupView, group_view
from lachesis.services.observe.rollout import RolloutTimeline, Timeline

__all__ = ["GroupDetail", "RevisionScores", "TokenColumns", "TokenWindow", "read_group_detail"]

_REVISIONS_S = 3.0
"""Seconds for which the scores of other revisions are searched."""
_MAX_REVISIONS = 20


class TokenWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens are wanted: up to `limit`, from token `start` of sequence `sequence` on.

    `sequence` None: of the first `MAX_SAMPLES` sequences, each with an equal part of `limit`.
    """

    limit: int
    sequence: int | None = None
    start: int = 0


class TokenColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one sequence, from token `start` on, of its `total`; lists have one entry per token.

    `mask`: whether the loss lets it in. `logprobs` are at the sampling temperature, None if the mask leaves a token out
    or they were not kept; `teacher` those of the teacher. `advantages`: the environment's own, or those of turns, 0 off
    the mask; None: there are none of a token's own.
    """

    sequence: int
    sample: int
    finish_reason: str
    start: int
    total: int
    ids: list[int]
    mask: list[bool]
    logprobs: list[float | None]
    teacher: list[float | None] | None
    advantages: list[float] | None


class RevisionScores(msgspec.Struct, frozen=True, kw_only=True):
    """What another revision says of a group; lists have one entry per sample.

    `unscored`: why it has no scores.
    """

    revision: str
    raters: dict[str, str]
    scores: list[float | None] = []
    ratings: dict[str, list[float | None]] = {}
    rewards: list[float | None] = []
    advantages: list[float | None] = []
    verdict: str | None = None
    unscored: str | None = None


class GroupDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One group. `teacher_reason` says why the teacher's logprobs are missing, None: they are not, or none are wanted.

    `revisions_complete` is false where the search for other revisions was given up.
    """

    view: GroupView
    timeline: Timeline
    tokenizer_hash: str
    tokens: list[TokenColumns]
    teacher_reason: str | None
    revisions: list[RevisionScores]
    revisions_complete: bool


async def read_group_detail(bus: Bus, config: RunConfig, name: str, window: TokenWindow) -> GroupDetail:
    """Return the group whose id is `name` or has it in it. Raises as `find_rollout`, and `SchemaError`."""
    rollout = await find_rollout(bus, config, name, annotated=True)
    group = await _payload(bus, rollout)
    teacher, reason = await _teacher(bus, rollout, group)
    revisions, complete = await _other_revisions(bus, config, rollout)
    return GroupDetail(
        view=group_view(rollout, group, config.batching),
        timeline=rollout.timeline(config.batching, await bus.server_time_ns()),
        tokenizer_hash=group.tokenizer_hash,
        tokens=list(_columns(group, rollout.reward, teacher, window)),
        teacher_reason=reason,
        revisions=revisions,
        revisions_complete=complete,
    )


async def _payload(bus: Bus, rollout: RolloutTimeline) -> RolloutGroup:
    async with aclosing(bus.fetch(subjects.ROLLOUTS, [rollout.seq])) as messages:
        async for message in messages:
            return read_rollout(message).group
    raise NotFoundError(f"group {rollout.plan.group} is not stored any more")


async def _teacher(
    bus: Bus, rollout: RolloutTimeline, group: RolloutGroup
) -> tuple[TeacherLogprobs | None, str | None]:
    """Return the teacher's logprobs of a group, or why there are none."""
    pointer = rollout.teacher
    if pointer is None or pointer.stored is None:
        return None, pointer.reason if pointer is not None else None
    try:
        async with aclosing(bus.fetch(subjects.TEACHER, [pointer.stored])) as messages:
            async for message in messages:
                found = decode(TeacherLogprobs, message.data)
                if found.group == group.id and found.n_tokens == group.sequences.n_tokens:
                    return found, pointer.reason
                return None, "what is stored for this group is of another one"
    except (NotFoundError, SchemaError) as error:
        return None, str(error)
    return None, "the teacher's logprobs are not stored any more"


def _columns(
    group: RolloutGroup, reward: GroupReward | None, teacher: TeacherLogprobs | None, window: TokenWindow
) -> Iterator[TokenColumns]:
    sequences = group.sequences
    by_turn = _turn_advantages(sequences, reward)
    shown = range(min(len(sequences), MAX_SAMPLES))
    wanted = shown if window.sequence is None else range(window.sequence, window.sequence + 1)
    limit = max(1, window.limit // max(1, len(wanted)))
    cuts = sequences.cuts()
    by_teacher = None if teacher is None else teacher.values()
    missing = frozenset(teacher.missing) if teacher is not None else frozenset()
    for number, sequence in islice(enumerate(sequences), min(wanted.start, len(sequences)), wanted.stop):
        part = slice(window.start, window.start + limit)
        mask, logprobs = sequence.loss_mask, sequence.logprobs
        advantages = sequence.token_advantages if by_turn is None else by_turn[number]
        theirs = by_teacher[cuts[number] : cuts[number + 1]] if by_teacher is not None else None
        ids: list[int] = sequence.tokens[part].tolist()
        yield TokenColumns(
            sequence=number,
            sample=number if sequences.sample_index is None else sequences.sample_index[number],
            finish_reason=sequence.finish_reason,
            start=window.start,
            total=len(sequence.tokens),
            ids=ids,
            mask=mask[part].tolist(),
            logprobs=[None] * len(ids) if logprobs is None else _masked(logprobs[part], mask[part]),
            teacher=None if theirs is None or number in missing else _masked(theirs[part], mask[part]),
            advantages=advantages[part].tolist() if isinstance(advantages, np.ndarray) else None,
        )


def _turn_advantages(
    sequences: Sequences, reward: GroupReward | None
) -> list[float | NDArray[np.float32] | None] | None:
    """Return for each sequence the advantage of each token's turn; None: turns have none, or not yet."""
    if sequences.turn_rewards is None or reward is None or not reward.turn_advantages:
        return None
    try:
        return credit_by_turn(reward.turn_advantages, sequences)
    except DataError:
        return None  # no trainer can use it either, and says why


def _masked(values: NDArray[np.float32], mask: NDArray[np.bool_]) -> list[float | None]:
    """Return the values as JSON has them, None where the mask is false; four digits, which is what people read."""
    return [round(value, 4) if learn else None for value, learn in zip(values.tolist(), mask.tolist(), strict=True)]


async def _other_revisions(bus: Bus, config: RunConfig, rollout: RolloutTimeline) -> tuple[list[RevisionScores], bool]:
    """Return what replayed revisions say of a group, the first of each, and whether all of them were read."""
    found: dict[str, RevisionScores] = {}
    subject = subjects.replay("rescore", config.run, "*", rollout.env)
    with anyio.move_on_after(_REVISIONS_S) as search:
        async with bus.read(subjects.REPLAY, [subject], follow=False) as messages:
            async for message in messages:
                try:
                    event = decode(RescoreEvent, message.data)
                except SchemaError:
                    continue  # what cannot be read says nothing of this group
                if event.revision in found or not (said := _rescored(event, rollout.plan.group)):
                    continue
                found[event.revision] = said
                if len(found) == _MAX_REVISIONS:
                    return list(found.values()), False
    return list(found.values()), not search.cancelled_caught


def _rescored(event: RescoreEvent, group: str) -> RevisionScores | None:
    score: GroupScore | None = next((one for one in event.scores if one.group == group), None)
    reward: GroupReward | None = next((one for one in event.rewards if one.group == group), None)
    unscored = next((one.reason for one in event.unscored if one.group == group), None)
    if score is None and reward is None and unscored is None:
        return None
    return RevisionScores(
        revision=event.revision,
        raters=event.raters,
        scores=score.scores if score else [],
        ratings=score.ratings if score else {},
        rewards=reward.rewards if reward else [],
        advantages=reward.advantages if reward else [],
        verdict=reward.verdict if reward else None,
        unscored=unscored,
    )
