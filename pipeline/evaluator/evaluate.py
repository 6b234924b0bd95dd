"""Evaluates a policy on an environment; it makes no rollout events.

For an environment, an inference server and k it returns an `EvalResult`. The result names the weights that were
measured: a training run changes them all the time, and an average over several policies is not the score of any one.
There are two ways:

- pinned to a `policy_version`: the first sample that holds a token of another version ends the evaluation with
  PolicyMovedError. Leaving such samples out instead would bias the result, since long samples span several versions
  more often.
- not pinned: every sample counts, and the result names each version with its number of samples; `policy_version` is
  None as soon as there are two.

The error of the rate treats tasks as the independent units (`evaluator.logic.rates`).
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import anyio
import msgspec

from lachesis.pipeline.common.finite_mean import finite_mean
from lachesis.pipeline.common.real_number import finite_number
from lachesis.pipeline.common.user_code import refuse_ending
from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.inference_requests import Inference
from lachesis.pipeline.environment.rollout import GroupDraft, collect_group, deciding_error, describe_error
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.errors import EnvironmentCodeError, InfrastructureError, PolicyMovedError, PromptTooLongError
from lachesis.pipeline.evaluator.logic.rates import TaskResult, standard_error
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.runtime.retries import RetryWait
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.annotations import MAX_EVALUATION_EXAMPLES, MAX_EXAMPLE_CHARS, EvalExample
from lachesis.schemas.errors import ConfigError, DataError, LachesisError
from lachesis.schemas.ids import PolicyVersion

__all__ = ["EvalResult", "GroupScorer", "Score", "evaluate"]

Score = Callable[[Task, Session], Awaitable[float | None]]
GroupScorer = Callable[[GroupDraft], Awaitable[Sequence[float | None]]]
"""Returns a score for each session of a draft, in order."""


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are fractions from 0 to 1, None if no answer could be scored."""

    items: int
    k: int
    temperature: float
    threshold: float
    """A score from here on is a success."""
    avg_at_k: float | None
    """Mean success of the sampled answers that could be scored."""
    error: float | None
    """Standard error of `avg_at_k`, by tasks; None with fewer than two tasks that could be scored."""
    tasks: dict[int, TaskResult]
    """For each task, by its index: the sampled answers that succeeded and those that could be scored."""
    pass_at_k: float | None
    """Fraction of items with a success among k samples, over the items for which that is known."""
    greedy: float | None
    """Mean success at temperature 0; None also if it was not requested."""
    mean_score: float | None
    """Mean score of the sampled answers that could be scored."""
    mean_tokens: float | None
    """Generated tokens of a sample, greedy ones included."""
    unjudged: int
    """Samples without a score: the scorer did not know one, or a bug of the environment cost the sample."""
    versions: dict[str, int]
    """Samples (greedy ones too) that hold tokens of each policy version, oldest version first."""
    too_long: list[int]
    """Tasks with prompts that leave no room for an answer in the context; their samples are unjudged."""
    examples: list[EvalExample]
    """The first tasks with their greedy answers, for people to read."""

    @property
    def policy_version(self) -> str | None:
        """The one version that was measured; None if there were several."""
        return next(iter(self.versions)) if len(self.versions) == 1 else None


async def evaluate(
    env: Environment,
    inference: Inference,
    *,
    k: int = 4,
    temperature: float = 1.0,
    top_p: float = 1.0,
    items: Sequence[int] | None = None,
    score: Score | None = None,
    score_group: GroupScorer | None = None,
    threshold: float | None = None,
    greedy: bool = True,
    max_tokens: int | None = None,
    seed: int | None = None,
    policy_version: str | None = None,
    concurrency: int = 32,
    config: CollectConfig | None = None,
    report: Callable[[RetryWait], None] | None = None,
    skip: Callable[[int, LachesisError], None] | None = None,
) -> EvalResult:
    """Evaluate the policy behind `inference` on the tasks `items`, with k samples each.

    `items` are indices; by default all tasks.

    `score` (a sample) or `score_group` (all samples of a task) and `threshold` judge success; by default `env.score`
    and `env.success_threshold`. `concurrency`: items under way at once. `seed` makes the draws repeatable. `report`:
    as in `collect_group`. `skip` is called for an item if its requests or raters failed or were refused, and its
    samples count as unjudged; without `skip` that ends the evaluation. Prompts that leave no room for an answer are
    named in the result, unless all are so. Raises PolicyMovedError (see the module), and what `collect_group` raises,
    except that an item lost to the environment's bugs counts as unjudged, unless all do.
    """
    if k < 1 or concurrency < 1:
        raise ConfigError("evaluate: k and concurrency must be at least 1")
    if score is not None and score_group is not None:
        raise ConfigError("evaluate: give score or score_group, not both")
    indices = range(len(env)) if items is None else items
    if not indices:
        raise ConfigError("evaluate: no items to evaluate")
    tally = _Tally(policy_version, indices)
    scored = score_group or _one_by_one(env.score if score is None else score)
    places = anyio.CapacityLimiter(concurrency)

    async def draw(place: int, n: int, sampling: SamplingParams) -> list[float | None]:
        index = indices[place]
        scores: list[float | None] = [None] * n
        with _skip_on_failure(index, skip, tally.too_long):
            try:
                draft = await collect_group(
                    env, _task(env, index), inference, n, sampling, config=config, report=report
                )
            except EnvironmentCodeError as error:
                tally.bugs.append(error)
                return scores
            tally.count(draft)
            scores = [*await scored(draft), *[None] * len(draft.failures)]
            if sampling.temperature == 0 and draft.sessions and place < MAX_EVALUATION_EXAMPLES:
                tally.examples[place] = _example(index, draft.sessions[0], scores[0])
        return scores

    async def one(place: int) -> None:
        async with places:
            own_seed = None if seed is None else seed + place
            drawn = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=own_seed)
            tally.sampled[place] = await draw(place, k, drawn)
            if greedy:
                likeliest = SamplingParams(temperature=0.0, max_tokens=max_tokens)
                tally.greedy[place] = await draw(place, 1, likeliest)

    try:
        async with env.running(), anyio.create_task_group() as tasks:
            for place in range(len(indices)):
                tasks.start_soon(one, place)
    except ExceptionGroup as group:
        raise deciding_error(group) from group
    if skip is None:
        tally.refuse_all_too_long()
    return tally.result(k, temperature, env.success_threshold if threshold is None else threshold)


@contextmanager
def _skip_on_failure(
    index: int, skip: Callable[[int, LachesisError], None] | None, too_long: dict[int, PromptTooLongError]
) -> Iterator[None]:
    try:
        yield
    except PromptTooLongError as error:
        too_long[index] = error
        if skip is not None:
            skip(index, error)
    except (InfrastructureError, DataError) as error:
        if skip is None or isinstance(error, PolicyMovedError):
            raise
        skip(index, error)


def _one_by_one(score: Score) -> GroupScorer:
    async def scored(draft: GroupDraft) -> list[float | None]:
        scores = [await score(draft.task, session) for session in draft.sessions]
        return [None if one is None else finite_number(one) for one in scores]

    return scored


def _task(env: Environment, index: int) -> Task:
    try:
        with refuse_ending(f"{type(env).__name__}.task({index})"):
            return env.task(index)
    except EnvironmentCodeError:
        raise
    except Exception as error:
        raise EnvironmentCodeError(f"{type(env).__name__}.task({index}): {describe_error(error)}") from error


def _example(index: int, session: Session, score: float | None) -> EvalExample:
    asked = next((message.content for message in reversed(session.task.messages) if message.role == "user"), "")
    answer = session.text[:MAX_EXAMPLE_CHARS]
    return EvalExample(task=index, prompt=asked[-MAX_EXAMPLE_CHARS:], answer=answer, score=score)


class _Tally:
    """Results of the items of one evaluation: scores by place in the list of items, `indices`."""

    def __init__(self, policy_version: str | None, indices: Sequence[int]) -> None:
        self.indices = indices
        self.sampled: dict[int, list[float | None]] = {}
        self.greedy: dict[int, list[float | None]] = {}
        self.examples: dict[int, EvalExample] = {}
        self.bugs: list[EnvironmentCodeError] = []
        self.too_long: dict[int, PromptTooLongError] = {}
        self._pinned = policy_version
        self._versions: dict[str, int] = {}
        self._lengths: list[int] = []

    def count(self, draft: GroupDraft) -> None:
        """Count a group's versions and tokens. Raises PolicyMovedError."""
        for session in draft.sessions:
            for version in {version for one in session.sequences for _, version in one.versions}:
                if self._pinned is not None and version != self._pinned:
                    raise PolicyMovedError(
                        f"evaluation of {self._pinned} got tokens of {version}; evaluate again, or without "
                        "policy_version to accept a mixture that is named in the result"
                    )
                self._versions[version] = self._versions.get(version, 0) + 1
            self._lengths.append(sum(sum(one.loss_mask) for one in session.sequences))

    def refuse_all_too_long(self) -> None:
        """Raise PromptTooLongError when no prompt leaves room for an answer."""
        if len(self.too_long) == len(set(self.indices)):
            raise next(iter(self.too_long.values()))

    def result(self, k: int, temperature: float, threshold: float) -> EvalResult:
        scores = [value for place in sorted(self.sampled) for value in self.sampled[place]]
        judged = [value for value in scores if value is not None]
        if not judged and self.bugs:
            raise self.bugs[0]
        known = [passed for values in self.sampled.values() if (passed := _passed(values, threshold)) is not None]
        greedy = [value for values in self.greedy.values() for value in values]
        tasks = {self.indices[place]: _counted(values, threshold) for place, values in sorted(self.sampled.items())}
        return EvalResult(
            items=len(self.sampled),
            k=k,
            temperature=temperature,
            threshold=threshold,
            avg_at_k=finite_mean([value >= threshold for value in judged]),
            error=standard_error(list(tasks.values())),
            tasks=tasks,
            pass_at_k=finite_mean(known),
            greedy=finite_mean([value >= threshold for value in greedy if value is not None]),
            mean_score=finite_mean(judged),
            mean_tokens=finite_mean(self._lengths),
            unjudged=scores.count(None) + greedy.count(None),
            versions=dict(sorted(self._versions.items(), key=lambda entry: PolicyVersion.parse(entry[0]))),
            too_long=sorted(self.too_long),
            examples=[example for _, example in sorted(self.examples.items())],
        )


def _counted(values: Sequence[float | None], bar: float) -> TaskResult:
    judged = [value for value in values if value is not None]
    return TaskResult(sum(value >= bar for value in judged), len(judged))


def _passed(values: Sequence[float | None], bar: float) -> bool | None:
    """Return whether one of k samples succeeded; None if an unjudged one might have."""
    if any(value is not None and value >= bar for value in values):
        return True
    return None if None in values else False
