"""Makes a rollout group of a task.

With an environment, a task and an inference server, `collect_group` makes a `GroupDraft`, and `build_group` makes a
checked `RolloutGroup` of it. Only this file guarantees that a group holds only samples for which inference and
environment both worked, and that a failure is never a reward. After a bug of the environment, its sample is left out
and recorded. A sample that lost its server is generated again or left out (`CollectConfig.lost_samples`), since the
model's answer cannot have caused that. Any other infrastructure failure may have been caused by the answer, and
abandons the whole group, so that no kind of answer is filtered out.
"""

import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.cut_text import cut_middle
from lachesis.pipeline.common.error_remedies import with_cure
from lachesis.pipeline.common.outages import is_outage
from lachesis.pipeline.common.real_number import finite_number
from lachesis.pipeline.common.secret_texts import error_text, without_secrets
from lachesis.pipeline.common.user_code import log_failure, refuse_ending
from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.environment import Environment, Reward, resolve_awaitable
from lachesis.pipeline.environment.group_environment import GeneratedGroup, GroupEnvironment, SequenceExtras
from lachesis.pipeline.environment.inference_requests import Inference, InferenceRequests, derive_seed
from lachesis.pipeline.environment.plain_hooks import HOOKS
from lachesis.pipeline.environment.sequence_draft import SequenceDraft
from lachesis.pipeline.environment.session import SampleEnded, Session, SharedFirstTurn
from lachesis.pipeline.environment.session_calls import GroupCalls
from lachesis.pipeline.errors import (
    EnvironmentCodeError,
    InfrastructureError,
    NotResumableError,
    ServerAwayError,
    ToolError,
    leaves,
)
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.runtime.retries import RetryWait
from lachesis.pipeline.tasks.task import Task
from lachesis.pipeline.tasks.thoughts import OPENED_KEY
from lachesis.schemas.columns import Column, as_bytes
from lachesis.schemas.errors import ConfigError, DataError, LachesisError
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import Dispatch, RolloutGroup, Sequences, VersionSpan

__all__ = [
    "ENVIRONMENT_REWARD",
    "GroupDraft",
    "SampleFailure",
    "build_group",
    "collect_group",
    "deciding_error",
    "describe_error",
    "sample_failure",
]

ENVIRONMENT_REWARD = "environment"
"""Component of a reward that the environment gave no name."""
_MAX_TEXT_CHARS = 2000
_GROUP_S = 1.0
"""Extra seconds for a group if its environment ends it by itself, with a reason."""
_CANCELLED_S = 10.0
"""Seconds in which a rollout that is cancelled must end."""
_MAX_REFILLS = 2
"""How often lost samples of a group are generated again."""


class SampleFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that a bug of the environment or its own size cost.

    `text` is the last reply, `error` says what failed and where.
    """

    sample: int
    error: str
    text: str


class GroupDraft(msgspec.Struct, frozen=True, kw_only=True):
    """The samples collected for one task.

    `rewards`: per surviving sample, by component. `lost`: the samples that lost their server; those that are not among
    the sessions were left out, the others generated again. `extras` and `metadata` are those of an environment that
    makes whole groups; `task` may then differ from the requested one.
    """

    id: str
    task: Task
    sessions: list[Session]
    rewards: list[dict[str, float | None]]
    failures: list[SampleFailure]
    sampling: SamplingParams
    started_ns: int
    chat_template_kwargs: dict[str, Any] = {}
    lost: list[int] = []
    extras: SequenceExtras = SequenceExtras()
    metadata: dict[str, Any] = {}

    def with_samples(self, places: Sequence[int]) -> "GroupDraft":
        """Return the draft with the samples at these places, ascending, alone."""
        lengths = [sum(len(one.tokens) for one in session.sequences) for session in self.sessions]
        return msgspec.structs.replace(
            self,
            sessions=[self.sessions[place] for place in places],
            rewards=[self.rewards[place] for place in places],
            extras=self.extras.with_samples(places, lengths),
        )


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
    report: Callable[[RetryWait], None] | None = None,
    report_stuck: Callable[[str], None] | None = None,
    report_request: Callable[[int], None] | None = None,
    calls: GroupCalls | None = None,
) -> GroupDraft:
    """Let the model work `n` times on `task`.

    `group` is the id of the group to be, a new one where it is None. `report` is called before a request is repeated;
    without it, that is logged. `report_stuck` is called where a rollout goes on after its time limit: it waits for a
    thread that cannot be cancelled. `report_request` is called with 1 where a request begins, with -1 where it ends.
    `calls`: the recorded calls of the group, with which it goes on, and to which further ones are added; None: they are
    not recorded.

    Raises InfrastructureError when inference (or a tool's dependency) stayed down or a time limit passed, DataError
    when the server refuses the request or the task cannot be used, EnvironmentCodeError when the environment's bugs
    left fewer than two samples (fewer than one of one), ConfigError when its settings contradict each other.
    """
    if env.tool_timeout_s >= env.turn_timeout_s:
        raise ConfigError(f"{type(env).__name__}: tool_timeout_s must be below turn_timeout_s")
    if hasattr(env, "turn_reward"):
        raise ConfigError(
            f"{type(env).__name__}.turn_reward: there is no such hook; call session.reward_turn(value) after a turn"
        )
    started_ns = time.time_ns() if started_ns is None else started_ns
    config = config or CollectConfig()
    group = group or new_group_id()
    if isinstance(env, GroupEnvironment):
        requests = InferenceRequests(inference, config, report, run=sampling, report_request=report_request)
        generate = partial(env.generate_group, task, requests, n, sampling)
        made = await _made_by_environment(env, task, generate, report_stuck)
        _check_sampling(env, made.sessions, requests.otherwise)
        return GroupDraft(
            id=group,
            task=made.task,
            sessions=list(made.sessions),
            rewards=made.rewards,
            failures=[],
            sampling=sampling,
            started_ns=started_ns,
            extras=made.extras,
            metadata={**await _opening(requests, made.sessions), **made.metadata},
        )
    requests = InferenceRequests(inference, config, report, report_request=report_request)
    collected = _GroupSamples(env, task, requests, sampling, report_stuck=report_stuck, calls=calls)
    await collected.generate(range(n), keep_lost=config.lost_samples != "abandon")
    lost = sorted(collected.lost)
    if config.lost_samples == "refill":
        for _ in range(_MAX_REFILLS):
            if collected.lost and (collected.rewards or not collected.is_server_away):
                await collected.generate(sorted(collected.lost), keep_lost=True)
    fewest = min(n, config.fewest_samples if config.lost_samples == "drop" else n)
    if collected.lost and len(collected.rewards) < fewest:
        raise min(collected.lost.values(), key=lambda error: not isinstance(error, ServerAwayError))
    failures = collected.failures()
    if len(collected.rewards) < min(2, n):
        raise EnvironmentCodeError(
            f"{type(env).__name__} failed on {len(failures)} of {n} samples of item {task.item!r}: {failures[0].error}"
        ) from collected.bugs[failures[0].sample]
    sessions = [collected.sessions[sample] for sample in sorted(collected.rewards)]
    return GroupDraft(
        id=group,
        task=task,
        sessions=sessions,
        rewards=[collected.rewards[sample] for sample in sorted(collected.rewards)],
        failures=failures,
        sampling=sampling,
        started_ns=started_ns,
        chat_template_kwargs=config.chat_template_kwargs,
        lost=lost,
        metadata=await _opening(requests, sessions),
    )


def _check_sampling(env: Environment, sessions: Sequence[Session], otherwise: Sequence[tuple[list[int], str]]) -> None:
    """Raise `EnvironmentCodeError` if trained tokens were sampled with other parameters than the run's."""
    sequences = [(session.sample, one) for session in sessions for one in session.sequences]
    for ids, difference in otherwise:
        wanted = np.asarray(ids, np.int32)
        for sample, one in sequences:
            tokens, mask = np.asarray(one.tokens, np.int32), np.asarray(one.loss_mask, np.bool_)
            starts = np.flatnonzero(tokens[: len(tokens) - len(wanted) + 1] == wanted[0])
            for start in starts:
                place = slice(start, start + len(wanted))
                if mask[place].all() and np.array_equal(tokens[place], wanted):
                    raise EnvironmentCodeError(
                        f"{type(env).__name__}: sample {sample} is trained on tokens that were {difference}"
                    )


async def _opening(requests: InferenceRequests, sessions: Sequence[Session]) -> dict[str, Any]:
    """Return the metadata about the end of the group's prompts: the tag that opens the thinking, if there is one."""
    session = sessions[0] if sessions else None
    if session is None or True not in session.loss_mask:
        return {}
    opened = await requests.opened_by(session.tokens[: session.loss_mask.index(True)])
    return {OPENED_KEY: opened} if opened else {}


class _GroupSamples:
    """The samples of one group as they come: the rewards of those that stand, bugs, and those that were lost."""

    def __init__(
        self,
        env: Environment,
        task: Task,
        requests: InferenceRequests,
        sampling: SamplingParams,
        *,
        report_stuck: Callable[[str], None] | None = None,
        calls: GroupCalls | None = None,
    ) -> None:
        self.sessions: dict[int, Session] = {}
        self.rewards: dict[int, dict[str, float | None]] = {}
        self.bugs: dict[int, Exception] = {}
        self.lost: dict[int, ServerAwayError | NotResumableError] = {}
        self._env = env
        self._task = task
        self._requests = requests
        self._sampling = sampling
        self._report_stuck = report_stuck
        self._calls = calls
        self._rounds = 0

    async def generate(self, samples: Sequence[int], *, keep_lost: bool) -> None:
        """Let the model work on each of `samples` again, from where it is recorded. Without `keep_lost` a lost one is
        raised as any other error.
        """
        sampling = self._sampling
        if self._rounds:  # a seeded group must not draw again what it has
            sampling = msgspec.structs.replace(sampling, seed=derive_seed(sampling.seed, "refill", self._rounds))
        self._rounds += 1
        calls = self._calls
        fresh = [sample for sample in samples if calls is None or not calls.has_calls(sample)]
        opening = SharedFirstTurn(self._requests, self._task.messages, fresh, sampling)

        async def one(sample: int) -> None:
            session = self.sessions[sample] = Session(
                self._task,
                sample,
                opening=opening,
                requests=self._requests,
                sampling=sampling,
                max_turns=self._env.max_turns,
                calls=None if calls is None else calls.open(sample),
            )
            self.lost.pop(sample, None)
            done = None if calls is None else calls.finished(sample)
            if done is not None:
                session.restore(*done)
                self.rewards[sample] = done[0].rewards
                return
            try:
                outcome = await _collect_sample(self._env, self._task, session)
            except (ServerAwayError, NotResumableError) as error:
                if not keep_lost or session.failure is not error:
                    raise  # raised by a tool, say, which the model called
                self.lost[sample] = error
                if calls is not None and isinstance(error, NotResumableError):
                    calls.give_up(sample)
            else:
                if isinstance(outcome, Exception):
                    log_failure(f"{type(self._env).__name__}, item {self._task.item!r}, sample {sample}", outcome)
                    self.bugs[sample] = outcome
                else:
                    await session.end(outcome)
                    self.rewards[sample] = outcome

        try:
            async with background() as watching:
                watching.start_soon(_watch_end, self._env, self._task, self._report_stuck)
                async with anyio.create_task_group() as tasks:
                    for sample in samples:
                        tasks.start_soon(one, sample)
        except ExceptionGroup as errors:
            raise deciding_error(errors) from errors

    @property
    def is_server_away(self) -> bool:
        """Whether the server, and not their record, is why samples are lost; if all are, it is unavailable."""
        return all(isinstance(error, ServerAwayError) for error in self.lost.values())

    def failures(self) -> list[SampleFailure]:
        """Return the samples that bugs of the environment cost."""
        return [
            sample_failure(self.sessions[sample], describe_error(error)) for sample, error in sorted(self.bugs.items())
        ]


def sample_failure(session: Session, error: str) -> SampleFailure:
    """Return the record of a sample that is left out for `error`."""
    return SampleFailure(sample=session.sample, error=error, text=session.text[-_MAX_TEXT_CHARS:])


async def _made_by_environment(
    env: GroupEnvironment,
    task: Task,
    generate: Callable[[], Awaitable[GeneratedGroup]],
    report_stuck: Callable[[str], None] | None,
) -> GeneratedGroup:
    """Return what the environment makes. Raises `InfrastructureError` where that takes longer than a rollout may."""
    async with background() as watching:
        watching.start_soon(_watch_end, env, task, report_stuck)
        with HOOKS.move_on_after(env.rollout_timeout_s + _GROUP_S):
            return await generate()
    raise InfrastructureError(
        f"{type(env).__name__}: a group took longer than {env.rollout_timeout_s:g} s (rollout_timeout_s)"
    )


async def _watch_end(env: Environment, task: Task, report_stuck: Callable[[str], None] | None) -> None:
    """Report when a rollout goes on although its time is up and it was cancelled."""
    limit_s = env.rollout_timeout_s
    await HOOKS.sleep(limit_s + _CANCELLED_S)
    if report_stuck is not None:
        report_stuck(
            f"a rollout of {type(env).__name__}, item {task.item!r:.80}, cannot be cancelled after its "
            f"{limit_s:g} s (rollout_timeout_s): it waits for a thread that hangs"
        )


async def _collect_sample(env: Environment, task: Task, session: Session) -> dict[str, float | None] | Exception:
    """Return the sample's rewards by component, or the bug that cost it."""
    try:
        with HOOKS.move_on_after(env.rollout_timeout_s):
            with refuse_ending("its code"):
                try:
                    await env.rollout(task, session)
                except SampleEnded as ended:
                    if ended.fork:
                        raise
            if session.failure is None:
                with refuse_ending("its code"):
                    return _checked(env, session, await _reward(env, task, session))
    except Exception as error:  # noqa: BLE001 - the boundary to other people's code; every branch accounts for it
        raised = deciding_error(error) if isinstance(error, ExceptionGroup) else error
        if isinstance(raised, SampleEnded):
            return EnvironmentCodeError(
                f"{type(env).__name__}.rollout: {raised}: it has had max_turns ({env.max_turns}), its context is full, "
                "or its last turn was cut; where branches run, catch lachesis.SampleEnded in each, so that the others "
                "go on"
            )
        if session.failure is None:
            if isinstance(raised, LachesisError) and not isinstance(raised, EnvironmentCodeError | ToolError):
                raise raised from (None if raised is error else error)
            return raised
    if session.failure is not None:  # also when the environment swallowed it, or raised something else because of it
        raise session.failure
    raise InfrastructureError(f"{type(env).__name__}: a sample took longer than {env.rollout_timeout_s:g} s")


async def _reward(env: Environment, task: Task, session: Session) -> Reward:
    """Return the environment's reward. Raises `InfrastructureError` if a judge that it calls is unavailable."""
    try:
        return await resolve_awaitable(await HOOKS.call(env.reward, task, session))  # type: ignore[no-any-return]
    except Exception as error:
        if isinstance(error, LachesisError) or not is_outage(error):
            raise
        where = f"{type(env).__name__}.reward"
        log_failure(where, error)
        raise InfrastructureError(cut_middle(f"{where}: {error_text(error)}", _MAX_TEXT_CHARS)) from error


def _checked(env: Environment, session: Session, reward: Reward) -> dict[str, float | None]:
    name = type(env).__name__
    if not session.replies:
        raise EnvironmentCodeError(f"{name}.rollout ended before the model said anything: await session.generate()")
    components = dict(reward) if isinstance(reward, Mapping) else {ENVIRONMENT_REWARD: reward}
    found: dict[str, float | None] = {}
    for key, value in components.items():
        if not isinstance(key, str):
            raise EnvironmentCodeError(f"{name}: {key!r:.80} names a reward; several rewards have texts as names")
        try:
            found[key] = None if value is None else finite_number(value)
        except ValueError as error:
            raise EnvironmentCodeError(
                f"{name}: reward {key} is {error}; a reward is a finite number or None where that cannot be known, "
                "or several of these by name"
            ) from error
    return found


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

    `metadata` gains `failed_samples` where a bug of the environment or their size cost some, `lost_samples` where the
    server went away from some, and by sample `thought_calls` where tool calls were only thought of or shown, `diverged`
    where a conversation had another request after a kill than before it, and `samples` where the environment noted
    anything.
    Raises SchemaError, for one when the server's weight versions are not policy versions.
    """
    versions: list[str] = []
    spans = []
    sequences = [one for session in draft.sessions for one in session.sequences]
    for index, one in enumerate(sequences):
        for start, version in one.versions:
            if version not in versions:
                versions.append(version)
            spans.append(VersionSpan(index, start, versions.index(version)))
    offsets = [0, *accumulate(len(one.tokens) for one in sequences)]
    sample_index = [sample for sample, session in enumerate(draft.sessions) for _ in session.sequences]
    names = dict.fromkeys(name for rewards in draft.rewards for name in rewards)
    turn_rewards, turn_order, turn_parents = _turn_rewards(draft.sessions)
    notes = {**draft.metadata, **draft.extras.metadata, **(metadata or {})}
    if draft.failures:
        notes["failed_samples"] = msgspec.to_builtins(draft.failures)
    if any(session.thought_calls for session in draft.sessions):
        notes["thought_calls"] = [session.thought_calls for session in draft.sessions]
    diverged = {session.sample: session.diverged for session in draft.sessions if session.diverged is not None}
    if diverged:
        notes["diverged"] = {str(sample): text for sample, text in diverged.items()}
    if any(session.notes for session in draft.sessions):
        notes["samples"] = [session.notes for session in draft.sessions]
    if draft.lost:
        kept = {session.sample for session in draft.sessions}
        notes["lost_samples"] = {
            "refilled": [sample for sample in draft.lost if sample in kept],
            "left_out": [sample for sample in draft.lost if sample not in kept],
        }
    template = {"chat_template_kwargs": draft.chat_template_kwargs} if draft.chat_template_kwargs else {}
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
            tokens=as_bytes([token for one in sequences for token in one.tokens], "int32"),
            loss_mask=pack_mask([learn for one in sequences for learn in one.loss_mask]),
            logprobs=as_bytes([logprob for one in sequences for logprob in one.logprobs], "float32"),
            finish_reasons=[one.finish_reason for one in sequences],
            version_spans=spans,
            sample_index=sample_index if len(sequences) > len(draft.sessions) else None,
            rewards={name: [rewards.get(name) for rewards in draft.rewards] for name in names},
            turn_rewards=turn_rewards,
            turn_order=turn_order,
            turn_parents=turn_parents,
            token_advantages=draft.extras.token_advantages,
            columns={**_experts(sequences), **_sampling_mask(sequences), **draft.extras.columns},
            excluded_samples=draft.extras.excluded_samples,
        ),
        tokenizer_hash=tokenizer_hash,
        started_ns=draft.started_ns,
        lease=lease,
        skill=draft.task.skill,
        difficulty=draft.task.difficulty,
        dispatch=dispatch,
        task=draft.task.task,
        messages=[session.messages for session in draft.sessions],
        generation=_generation(draft.sampling) | template,
        metadata=notes,
    )
    group.check()
    if group.sequences.turn_rewards is not None:
        group.sequences.turns()
    return group


_PlacesByTurn = list[list[int]]


def _turn_rewards(
    sessions: Sequence[Session],
) -> tuple[list[list[float]] | None, _PlacesByTurn | None, _PlacesByTurn | None]:
    """Return `turn_rewards`, 0 for a turn without one, `turn_order` and `turn_parents`.

    None if no turn has a reward; the order, if it is that of the sequences; the parents, if no session was forked.
    """
    if not any(session.turn_rewards for session in sessions):
        return None, None, None
    rewards, order, parents = list[list[float]](), list[list[int]](), list[list[int]]()
    for session in sessions:
        trained = [call for one in session.sequences for call in one.turns]
        calls = sorted({*trained, *session.turn_rewards})
        rewards.append([session.turn_rewards.get(call, 0.0) for call in calls])
        place = {call: at for at, call in enumerate(calls)}
        order.append([place[call] for call in trained])
        before = session.turn_parents
        chain = range(-1, len(calls) - 1)
        parents.append(list(chain) if before is None else [_place_before(call, before, place) for call in calls])
    in_order = all(own == list(range(len(given))) for own, given in zip(order, rewards, strict=True))
    is_forked = any(session.turn_parents is not None for session in sessions)
    return rewards, None if in_order else order, parents if is_forked else None


def _place_before(call: int, parents: Mapping[int, int | None], place: Mapping[int, int]) -> int:
    """Return the place of the turn that a call continues, -1 for none."""
    before = parents[call]
    return -1 if before is None else place[before]


def _generation(sampling: SamplingParams) -> dict[str, Any]:
    """Return how a group was sampled; what decides its probabilities also where it is the default."""
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, **msgspec.to_builtins(sampling)}


def _sampling_mask(sequences: Sequence[SequenceDraft]) -> dict[str, Column]:
    """Return the ids among which tokens were sampled, if any were excluded."""
    width = max((len(row) for one in sequences for _, rows in one.sampling_masks for row in rows), default=0)
    if not width:
        return {}
    masks = [np.full((len(one.tokens), width), -1, np.int32) for one in sequences]
    for rows_of, one in zip(masks, sequences, strict=True):
        for start, rows in one.sampling_masks:
            for at, row in enumerate(rows, start):
                rows_of[at, : len(row)] = row
    return {"sampling_mask": Column(dtype="int32", data=as_bytes(np.concatenate(masks), "int32"), width=width)}


def _experts(sequences: Sequence[SequenceDraft]) -> dict[str, Column]:
    """Return the experts that a server recorded."""
    recorded = [one.routed_experts for one in sequences if one.routed_experts is not None]
    if not recorded:
        return {}
    width = recorded[0].shape[1]
    experts = [np.full((len(one.tokens), width), -1, np.int16) for one in sequences]
    for rows, one in zip(experts, sequences, strict=True):
        if one.routed_experts is not None:
            known = one.routed_experts[: len(rows)]
            if known.shape[1] != width:
                raise DataError(f"routed_experts: {known.shape[1]} a token in one sequence and {width} in another")
            rows[: len(known)] = known
    column = Column(dtype="int16", data=as_bytes(np.concatenate(experts), "int16"), width=width)
    return {"routed_experts": column}


def deciding_error(error: Exception) -> Exception:
    """Return the exception that decides how a group of them is handled.

    An error of this package before any other.
    """
    found = [leaf for leaf in leaves(error) if isinstance(leaf, Exception)]
    return next((leaf for leaf in found if isinstance(leaf, LachesisError)), found[0])


def describe_error(error: Exception) -> str:
    """Return what a user's code has raised, its place in the code, and how to mend it where that is known."""
    if isinstance(error, EnvironmentCodeError):
        said = without_secrets(str(error))  # it says all of that, and was raised by this package
        return cut_middle(said, _MAX_TEXT_CHARS)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    said = cut_middle(error_text(error).removesuffix(": "), _MAX_TEXT_CHARS)
    return with_cure(said + where, error)
