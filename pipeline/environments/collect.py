"""From a task to a rollout group.

In: an environment, a task and an inference server. Out: a `GroupDraft` (`collect_group`), then a checked `RolloutGroup`
(`build_group`). This file alone guarantees that a group holds only samples whose inference and environment both
worked: an infrastructure failure abandons the whole group, a bug of the environment leaves its sample out and on
record, and neither is ever a reward.
"""

import contextlib
import math
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec

from lachesis.pipeline.environments.config import CollectConfig
from lachesis.pipeline.environments.environment import Environment, Reward, settle
from lachesis.pipeline.environments.inference import Inference, Requests
from lachesis.pipeline.environments.session import Opening, SampleEnded, Session
from lachesis.pipeline.environments.task import Task
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.columns import as_bytes, pack_mask
from lachesis.schemas.errors import ConfigError, EnvironmentCodeError, InfrastructureError, LachesisError, ToolError
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.rollout import Dispatch, RolloutGroup, Sequences, VersionSpan

__all__ = ["ENVIRONMENT_REWARD", "GroupDraft", "SampleFailure", "build_group", "collect_group", "deciding_error"]

ENVIRONMENT_REWARD = "environment"
"""Component under which a reward goes that the environment gave no name."""
_LONGEST_TEXT = 2000


class SampleFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that a bug of the environment cost: `text` is the last reply, `error` says what failed and where."""

    sample: int
    error: str
    text: str


class GroupDraft(msgspec.Struct, frozen=True, kw_only=True):
    """What was collected for one task. `rewards`: per surviving sample, by component."""

    id: str
    task: Task
    sessions: list[Session]
    rewards: list[dict[str, float | None]]
    failures: list[SampleFailure]
    sampling: SamplingParams
    started_ns: int


async def collect_group(
    env: Environment,
    task: Task,
    inference: Inference,
    n: int,
    sampling: SamplingParams,
    *,
    config: CollectConfig | None = None,
    group: str | None = None,
    started_ns: int | None = None,
) -> GroupDraft:
    """Let the model work `n` times on `task`. `group` is the id of the group to be, a new one where it is None.

    Raises InfrastructureError when inference (or a tool's dependency) stayed down or a time limit passed, DataError
    when the server refuses or the task cannot be asked, EnvironmentCodeError when the environment's bugs left fewer
    than two samples (fewer than one of one), ConfigError when its settings contradict each other.
    """
    if env.tool_timeout_s >= env.turn_timeout_s:
        raise ConfigError(f"{type(env).__name__}: tool_timeout_s must be below turn_timeout_s")
    started_ns = time.time_ns() if started_ns is None else started_ns
    requests = Requests(inference, config or CollectConfig())
    opening = Opening(requests, task.messages, n, sampling)
    sessions = [
        Session(task, sample, opening=opening, requests=requests, sampling=sampling, max_turns=env.max_turns)
        for sample in range(n)
    ]
    outcomes: dict[int, dict[str, float | None] | Exception] = {}

    async def one(session: Session) -> None:
        outcomes[session.sample] = await _collect_sample(env, task, session)

    try:
        async with anyio.create_task_group() as samples:
            for session in sessions:
                samples.start_soon(one, session)
    except ExceptionGroup as errors:
        raise deciding_error(errors) from errors

    bugs = {sample: outcome for sample, outcome in outcomes.items() if isinstance(outcome, Exception)}
    rewards = {sample: outcome for sample, outcome in outcomes.items() if not isinstance(outcome, Exception)}
    scored_by_turn = {bool(sessions[sample].turn_rewards) for sample in rewards}
    failures = [
        SampleFailure(sample=sample, error=_place(error), text=sessions[sample].text[-_LONGEST_TEXT:])
        for sample, error in sorted(bugs.items())
    ]
    if len(rewards) < min(2, n):
        raise EnvironmentCodeError(
            f"{type(env).__name__} failed on {len(failures)} of {n} samples of item {task.item!r}: {failures[0].error}"
        ) from bugs[failures[0].sample]
    if len(scored_by_turn) > 1:
        raise EnvironmentCodeError(f"{type(env).__name__} rewarded the turns of some samples of {task.item!r} only")
    return GroupDraft(
        id=group or new_group_id(),
        task=task,
        sessions=[sessions[sample] for sample in sorted(rewards)],
        rewards=[rewards[sample] for sample in sorted(rewards)],
        failures=failures,
        sampling=sampling,
        started_ns=started_ns,
    )


async def _collect_sample(env: Environment, task: Task, session: Session) -> dict[str, float | None] | Exception:
    """Return the sample's rewards by component, or the bug that cost it."""
    try:
        with anyio.move_on_after(env.rollout_timeout_s):
            with contextlib.suppress(SampleEnded):
                await env.rollout(task, session)
            if session.failure is None:
                return _checked(env, session, await settle(env.reward(task, session)))
    except Exception as error:  # noqa: BLE001 - the boundary to other people's code; every branch accounts for it
        raised = deciding_error(error) if isinstance(error, ExceptionGroup) else error
        if session.failure is None:
            if isinstance(raised, LachesisError) and not isinstance(raised, EnvironmentCodeError | ToolError):
                raise raised from (None if raised is error else error)
            return raised
    if session.failure is not None:  # also when the environment swallowed it, or raised something else because of it
        raise session.failure
    raise InfrastructureError(f"{type(env).__name__}: a sample took longer than {env.rollout_timeout_s:g} s")


def _checked(env: Environment, session: Session, reward: Reward) -> dict[str, float | None]:
    name = type(env).__name__
    if not session.replies:
        raise EnvironmentCodeError(f"{name}.rollout ended before the model said anything: await session.generate()")
    if session.turn_rewards and len(session.turn_rewards) != len(session.replies):
        raise EnvironmentCodeError(
            f"{name} rewarded {len(session.turn_rewards)} of {len(session.replies)} turns; "
            "reward each turn once, or none"
        )
    components = dict(reward) if isinstance(reward, Mapping) else {ENVIRONMENT_REWARD: reward}
    for key, value in [*components.items(), *(("of a turn", value) for value in session.turn_rewards)]:
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise EnvironmentCodeError(f"{name}: reward {key} is {value!r}; a reward is a finite number or None")
    return {key: None if value is None else float(value) for key, value in components.items()}


def build_group(
    draft: GroupDraft,
    *,
    run: str,
    env: str,
    producer: str,
    epoch: int,
    counter: int,
    tokenizer_hash: str,
    lease: str | None = None,
    dispatch: Dispatch | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> RolloutGroup:
    """Return the event of a draft, checked; `Plan.of` gives its header.

    `metadata` gains `failed_samples` where a bug of the environment cost some. Raises SchemaError, for one when the
    server's weight versions are not policy versions.
    """
    versions: list[str] = []
    spans = []
    for index, session in enumerate(draft.sessions):
        for start, version in session.versions:
            if version not in versions:
                versions.append(version)
            spans.append(VersionSpan(index, start, versions.index(version)))
    offsets = [0]
    for session in draft.sessions:
        offsets.append(offsets[-1] + len(session.tokens))
    names = dict.fromkeys(name for rewards in draft.rewards for name in rewards)
    by_turn = any(session.turn_rewards for session in draft.sessions)
    notes = dict(metadata or {})
    if draft.failures:
        notes["failed_samples"] = msgspec.to_builtins(draft.failures)
    group = RolloutGroup(
        id=draft.id,
        run=run,
        env=env,
        item=draft.task.item,
        producer=producer,
        epoch=epoch,
        counter=counter,
        policy_versions=versions,
        sequences=Sequences(
            offsets=as_bytes(offsets, "int32"),
            tokens=as_bytes([token for session in draft.sessions for token in session.tokens], "int32"),
            loss_mask=pack_mask([learn for session in draft.sessions for learn in session.loss_mask]),
            logprobs=as_bytes([logprob for session in draft.sessions for logprob in session.logprobs], "float32"),
            finish_reasons=[session.finish_reason for session in draft.sessions],
            version_spans=spans,
            rewards={name: [rewards.get(name) for rewards in draft.rewards] for name in names},
            turn_rewards=[session.turn_rewards for session in draft.sessions] if by_turn else None,
        ),
        tokenizer_hash=tokenizer_hash,
        started_ns=draft.started_ns,
        lease=lease,
        skill=draft.task.skill,
        difficulty=draft.task.difficulty,
        dispatch=dispatch,
        task=draft.task.task,
        messages=[session.messages for session in draft.sessions],
        generation=msgspec.to_builtins(draft.sampling),
        metadata=notes,
    )
    group.check()
    return group


def deciding_error(error: Exception) -> Exception:
    """Return the exception that decides how a group of them is handled: an error of this package before any other."""
    if not isinstance(error, ExceptionGroup):
        return error
    leaves = [deciding_error(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, LachesisError)), leaves[0])


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}"[:_LONGEST_TEXT] + where
