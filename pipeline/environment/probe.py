"""Tries an environment and its raters on scripted answers, before anything is generated for them.

Given an environment and its scorer, it returns the problems that occurred with every answer, in words, and what could
not be tried: unavailable infrastructure and timeouts say nothing about code.
"""

from typing import NamedTuple

import anyio

from lachesis.pipeline.common.error_remedies import cure_of
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.group_environment import GroupEnvironment
from lachesis.pipeline.environment.rollout import GroupDraft, build_group, collect_group
from lachesis.pipeline.errors import EnvironmentCodeError, InfrastructureError, leaves
from lachesis.pipeline.inference.engine_table import engines_that
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.scorer.logic.unrated import ABSTAINED
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.pipeline.tasks.references import reference_texts
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["ProbeFinding", "probe_environment"]

_MAX_TOKENS = 4096
_PROBE_S = 20.0
_MAX_REFERENCES = 64
"""Number of tasks with reference answers to check."""


class ProbeFinding(NamedTuple):
    """A failure with every answer, or what was not tried. `sure`: by the failure's text, no other answer will help."""

    text: str
    sure: bool = False


def _forced() -> str:
    return (
        "it forces what an answer must match (tool_choice, or response_format), which the run's inference server "
        f"refuses: let the model choose, or set {engines_that(lambda spec: spec.constrains_answers)}"
    )


async def probe_environment(
    env: Environment, name: str, scorer: EnvironmentScorer, *, may_force: bool = True
) -> list[ProbeFinding]:
    """Return what fails on every scripted answer to a task: the environment's code, or raters.

    `may_force`: whether the run's inference server serves requests that force what an answer must match. The task is
    the first one; and of some others the first with a reference that is no single answer, if it has one.
    """
    if isinstance(env, GroupEnvironment):
        return [ProbeFinding("not tried: its own code generates, with a model's tokens")]
    with anyio.move_on_after(_PROBE_S):
        async with env.running():  # what it runs beside its samples lasts for all of them
            found = await _probe_task(env, env.task(0), name, scorer, may_force=may_force)
            odd = None if found else _task_of_odd_reference(env)
            return found if odd is None else await _probe_task(env, odd, name, scorer, may_force=may_force)
    return [ProbeFinding(f"not tried to the end: scripted answers had no ratings within {_PROBE_S:g} s")]


async def _probe_task(
    env: Environment, task: Task, name: str, scorer: EnvironmentScorer, *, may_force: bool
) -> list[ProbeFinding]:
    answers = _answers(task)
    inference = FakeInference(lambda _, call: answers[call % len(answers)])
    try:
        draft = await collect_group(env, task, inference, len(answers), SamplingParams(max_tokens=_MAX_TOKENS))
    except EnvironmentCodeError as error:
        if inference.refused:
            return [ProbeFinding(f"not tried to the end: {inference.refused[0]}")]
        if inference.forced and not may_force:
            return [ProbeFinding(f"{_forced()}; on an answer that matched: {error}")]
        sure = any(cure_of(leaf) is not None for leaf in leaves(error.__cause__ or error))
        return [ProbeFinding(f"{error}; `lachesis env verify` shows more", sure)]
    except (InfrastructureError, DataError) as error:
        return [ProbeFinding(f"not tried: the environment gave no group ({error})")]
    if inference.forced and not may_force:
        return [ProbeFinding(_forced())]
    return await _probe_raters(draft, name, scorer)


def _task_of_odd_reference(env: Environment) -> Task | None:
    """Return the first of some tasks, spread over all, whose answer is no single one; None without any."""
    for place in range(_MAX_REFERENCES):
        try:
            task = env.task(place * (len(env) - 1) // (_MAX_REFERENCES - 1))
        except Exception:  # noqa: BLE001 - other people's code; `env verify` and the run name it
            return None
        answer = task.task.get("answer")
        try:
            if answer is not None:
                reference_texts(answer, task.item)
        except ConfigError:
            return task
    return None


async def _probe_raters(draft: GroupDraft, name: str, scorer: EnvironmentScorer) -> list[ProbeFinding]:
    group = build_group(draft, run="probe", env=name, producer="probe", epoch=0, counter=0, tokenizer_hash="-")
    try:
        await scorer.score(group, seq=1)
    except InfrastructureError as error:
        return [ProbeFinding(f"not tried: {error}; the run's groups wait until that answers")]
    except DataError as error:
        return [ProbeFinding(f"scripted answers cannot be scored: {error}")]
    held = f" (the task holds {', '.join(map(repr, draft.task.task)) or 'nothing'})"
    count = len(draft.sessions)
    return [
        ProbeFinding(
            f"{rater} gave none of {count} scripted answers a rating: {why}{held if 'KeyError' in why else ''}",
            sure="Mend it: " in why,
        )
        for rater, why in scorer.unrated.reasons().items()
        if why != ABSTAINED
    ]


def _answers(task: Task) -> list[str]:
    answer = task.task.get("answer")
    one = answer[0] if isinstance(answer, list) and answer else answer
    reference = [str(one)] if isinstance(one, str | int | float) else []
    return ["1", "\\boxed{1}", "I am not sure; let me think about it.", *reference]
