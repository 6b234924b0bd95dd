"""Runs an inference test of an environment: samples of some tasks from one model, before any run.

For an environment, its settings and a model it returns `InferenceSample`s. Every sample has a request of its own, so a
failed request costs one sample. Only this file guarantees that each sample has exactly one outcome, and that only an
answer of the model has a reward: after a failed request, a bug or with an unavailable rater, the reward is None and the
reason is named.
"""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import anyio
import msgspec

from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.environment.config import CollectConfig, EnvironmentConfig
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.inference_requests import Inference, derive_seed, max_context_of
from lachesis.pipeline.environment.rollout import GroupDraft, build_group, collect_group, deciding_error
from lachesis.pipeline.errors import EnvironmentCodeError, InfrastructureError
from lachesis.pipeline.evaluator.logic.model_summary import InferenceSample, SampleOutcome
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.chat_client import ChatInference
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.runtime.retries import RetryWait
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["InferenceTest", "ModelUnderTest", "RequestMeter"]


class ModelUnderTest(NamedTuple):
    """A model under test: its name in the table, and a function that makes the inference of one sample."""

    name: str
    connect: Callable[[], Inference]


class InferenceTest:
    """`steps` tasks of an environment, `samples` answers to each; the same tasks for every model."""

    def __init__(
        self,
        env: Environment,
        settings: EnvironmentConfig,
        scoring: ScoringConfig,
        *,
        steps: int,
        samples: int,
        seed: int = 0,
        concurrency: int = 16,
        collect: CollectConfig | None = None,
    ) -> None:
        """`settings`: how it is sampled, and its own raters. `scoring`: the raters of a run, which judge if there are
        any; without raters the environment's reward does. `concurrency`: samples under way at once.

        Raises ConfigError when the pool has no task or a rater cannot be loaded.
        """
        self._env = env
        self._settings = settings
        self._samples = samples
        self._seed = seed
        self._concurrency = concurrency
        self._collect = collect or settings.collect_config()
        own = settings.scoring or scoring
        self._scorer = EnvironmentScorer(own, settings, explains=True) if own.raters else None
        if len(env) < 1:
            raise ConfigError(f"{type(env).__name__} has no tasks")
        draw = random.Random(f"{seed}/inference test")
        indices = draw.sample(range(len(env)), min(steps, len(env)))
        self.indices = indices + [draw.randrange(len(env)) for _ in range(steps - len(indices))]
        """The task of each step."""

    async def run(
        self,
        model: ModelUnderTest,
        keep: Callable[[InferenceSample], None],
        report: Callable[[RetryWait], None] | None = None,
    ) -> list[InferenceSample]:
        """Return all samples of `model`, in order; each group's go to `keep` once the whole group has ended.

        `report`: as in `collect_group`. Raises ConfigError when the environment's settings contradict each other.
        """
        with suppress(InfrastructureError, DataError):  # the requests of the samples report it, each in its place
            limit = await max_context_of(model.connect())
            self._collect = msgspec.structs.replace(self._collect, max_context=limit)
        places = anyio.CapacityLimiter(self._concurrency)
        groups: dict[int, list[InferenceSample]] = {}

        async def group(step: int) -> None:
            groups[step] = await self._group(model, step, places, report)
            for sample in groups[step]:
                keep(sample)

        try:
            async with self._env.running(), anyio.create_task_group() as tasks:
                for step in range(len(self.indices)):
                    tasks.start_soon(group, step)
        except ExceptionGroup as errors:
            raise deciding_error(errors) from errors
        return [sample for step in sorted(groups) for sample in groups[step]]

    async def _group(
        self,
        model: ModelUnderTest,
        step: int,
        places: anyio.CapacityLimiter,
        report: Callable[[RetryWait], None] | None,
    ) -> list[InferenceSample]:
        try:
            task = self._env.task(self.indices[step])
        except Exception as error:  # noqa: BLE001 - the boundary to other people's code
            text = f"task({self.indices[step]}): {error_text(error)}"
            bug = _Attempt(None, RequestMeter(model.connect()), "environment_bug", text)
            return [_record(model.name, step, number, "?", attempt=bug) for number in range(self._samples)]
        attempts: dict[int, _Attempt] = {}

        async def one(number: int) -> None:
            async with places:
                attempts[number] = await self._attempt(task, model, step, number, report)

        async with anyio.create_task_group() as tasks:
            for number in range(self._samples):
                tasks.start_soon(one, number)
        ended = [attempts[number] for number in range(self._samples)]
        rewards = iter(await self._rewards([one.draft for one in ended if one.draft is not None]))
        return [
            _record(
                model.name, step, number, task.item, attempt=one, scored=None if one.draft is None else next(rewards)
            )
            for number, one in enumerate(ended)
        ]

    async def _attempt(
        self, task: Task, model: ModelUnderTest, step: int, number: int, report: Callable[[RetryWait], None] | None
    ) -> "_Attempt":
        settings = self._settings
        sampling = SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_new_tokens,
            seed=derive_seed(self._seed, step, number),
        )
        meter = RequestMeter(model.connect())
        outcome: SampleOutcome
        try:
            draft = await collect_group(self._env, task, meter, 1, sampling, config=self._collect, report=report)
        except InfrastructureError as error:
            outcome, text = "request_failed", str(error)
        except DataError as error:
            outcome, text = "request_refused", str(error)
        except EnvironmentCodeError as error:
            outcome, text = "environment_bug", str(error)
        else:
            return _Attempt(draft, meter, "scored", None)
        return _Attempt(None, meter, outcome, text)

    async def _rewards(self, drafts: Sequence[GroupDraft]) -> list[tuple[float | None, str | None]]:
        """Return for each answer of a group its reward, or None and the reason."""
        if not drafts:
            return []
        if self._scorer is None:
            return [await self._own_reward(draft) for draft in drafts]
        merged = msgspec.structs.replace(
            drafts[0],
            sessions=[session for draft in drafts for session in draft.sessions],
            rewards=[rewards for draft in drafts for rewards in draft.rewards],
        )
        group = build_group(merged, run="test", env="test", producer="test", epoch=0, counter=0, tokenizer_hash="-")
        try:
            scored = await self._scorer.score(group, seq=1)
        except (InfrastructureError, DataError) as error:
            return [(None, f"raters: {error}")] * len(drafts)
        return [(score, None if score is not None else "the raters gave no score") for score in scored.scores]

    async def _own_reward(self, draft: GroupDraft) -> tuple[float | None, str | None]:
        (rewards,) = draft.rewards
        name = type(self._env).__name__
        if rewards:
            values = list(rewards.values())
            if None in values:
                return None, f"{name}.reward could not tell"
            return sum(value for value in values if value is not None), None
        if type(self._env).score is Environment.score:
            return None, f"{name} leaves rewards to raters: name some with --config FILE --env NAME"
        try:
            return await self._env.score(draft.task, draft.sessions[0]), None
        except Exception as error:  # noqa: BLE001 - the boundary to other people's code
            return None, f"{name}.score: {error_text(error)}"


class RequestMeter:
    """An inference with the seconds and tokens that requests to it took, over all of them."""

    def __init__(self, inference: Inference) -> None:
        self.seconds: float | None = None
        self.generated = 0
        self._inference = inference

    @property
    def tokens(self) -> int | None:
        """Tokens that the model generated; None if the server does not count them."""
        return self._inference.tokens if isinstance(self._inference, ChatInference) else self.generated

    async def tokenize(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **given: Any
    ) -> list[int]:
        """Return what the inference does."""
        return await self._inference.tokenize(messages, add_generation_prompt=add_generation_prompt, **given)

    async def max_model_len(self) -> int | None:
        """Return what the inference does; None where it does not say."""
        return await max_context_of(self._inference)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return what the inference does."""
        return await self._inference.detokenize(token_ids)

    async def generate(
        self, prompt_ids: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        """Return what the inference does, and count it."""
        began_s = time.monotonic()
        try:
            found = await self._inference.generate(prompt_ids, n, sampling)
        finally:
            self.seconds = (self.seconds or 0.0) + time.monotonic() - began_s
        self.generated += sum(len(sample.token_ids) for sample in found)
        return found


class _Attempt(NamedTuple):
    """How one sample ended: a draft of a single session, or what prevented it."""

    draft: GroupDraft | None
    meter: RequestMeter
    outcome: SampleOutcome
    error: str | None


def _record(
    model: str,
    step: int,
    number: int,
    item: str,
    *,
    attempt: _Attempt,
    scored: tuple[float | None, str | None] | None = None,
) -> InferenceSample:
    if attempt.draft is None or scored is None:
        return InferenceSample(
            model=model, step=step, sample=number, item=item, outcome=attempt.outcome, error=attempt.error,
            latency_s=attempt.meter.seconds,
        )  # fmt: skip
    (session,) = attempt.draft.sessions
    reward, why_not = scored
    return InferenceSample(
        model=model,
        step=step,
        sample=number,
        item=item,
        outcome="unscored" if reward is None else "scored",
        reward=reward,
        parsed=session.finish_reason != "length" and not any(reply.tool_errors for reply in session.replies),
        finish_reason=session.finish_reason,
        turns=len(session.replies),
        tokens=attempt.meter.tokens,
        latency_s=attempt.meter.seconds,
        error=why_not,
        messages=[msgspec.to_builtins(message) for message in session.messages],
    )
