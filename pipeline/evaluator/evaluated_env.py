"""Loads an environment with its evaluation tasks, and measures a policy on them.

The evaluator of a run and `lachesis eval` both use it, so both measure the same tasks in the same way: only the
configuration determines the held-out tasks, sampling, judgement and the seed of every draw.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lachesis.pipeline.environment.config import EnvironmentConfig
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.inference_requests import Inference, max_context_of
from lachesis.pipeline.environment.load import item_keys_of, load_environment
from lachesis.pipeline.evaluator.evaluate import EvalResult, GroupScorer, evaluate
from lachesis.pipeline.evaluator.settings import EvaluatedEnvSettings
from lachesis.pipeline.evaluator.success import can_be_judged, success_scorer
from lachesis.pipeline.runtime.retries import RetryWait
from lachesis.pipeline.tasks.held_out import reason_none_held_out
from lachesis.schemas.control import HeldOutRecord
from lachesis.schemas.errors import LachesisError

__all__ = ["EvaluatedEnv", "load_evaluated_env"]


@dataclass(frozen=True, slots=True)
class EvaluatedEnv:
    """An environment and `tasks` to evaluate it on, often none; a smaller evaluation takes the first of them.

    `judged`: whether a rater or the environment can decide which answers succeed; if not, there are no tasks.
    """

    name: str
    env: Environment
    settings: EnvironmentConfig
    tasks: Sequence[int]
    score_group: GroupScorer
    keys: Sequence[int] = ()
    """For each of these tasks, a key of its prompt in 53 bits: the same in another order of the pool."""
    judged: bool = True
    withheld: int = 0
    """Tasks that would be held out, had they not been drawn before."""
    most: int | None = None
    """Maximum number of tasks that the run holds out, evaluate.items; None: it holds none out."""
    samples: int = 4
    """Answers to each task, as configured."""
    seed: int = 0
    obstacle: str | None = None
    """Why the environment cannot be evaluated; then there are no tasks."""

    def reason_without_tasks(self) -> str | None:
        """Return why it is not evaluated, and how to change that; None if it has tasks."""
        if self.tasks:
            return None
        if self.obstacle is not None:
            return f"environment {self.name} is not evaluated: {self.obstacle}"
        if not self.judged:
            return (
                f"environment {self.name} is not evaluated: it gives no reward, and no rater judges its answers; add a "
                "rater to scoring.raters, or a reward to the environment"
            )
        return reason_none_held_out(self.name, len(self.env), most=self.most, withheld=self.withheld)

    async def measure(
        self,
        inference: Inference,
        *,
        items: int,
        samples: int | None = None,
        greedy: bool = True,
        policy_version: str | None = None,
        report: Callable[[RetryWait], None] | None = None,
        skip: Callable[[int, LachesisError], None] | None = None,
    ) -> EvalResult:
        """Measure the policy behind `inference` on the first `items` tasks.

        `samples`: answers to each, by default as configured. The other parameters, and errors, are as in `evaluate`.
        """
        return await evaluate(
            self.env,
            inference,
            k=samples or self.samples,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            items=self.tasks[:items],
            score_group=self.score_group,
            threshold=1.0,
            greedy=greedy,
            max_tokens=self.settings.max_new_tokens,
            seed=self.seed,
            policy_version=policy_version,
            concurrency=self.settings.concurrency,
            config=self.settings.collect_config(max_context=await max_context_of(inference)),
            report=report,
            skip=skip,
        )


def load_evaluated_env(settings: EvaluatedEnvSettings, name: str, record: HeldOutRecord | None = None) -> EvaluatedEnv:
    """Return an environment with the tasks that it is evaluated on. Raises as `load_environment`.

    `record`: the tasks that earlier starts of the run held out.
    """
    env = load_environment(settings.config.kind, settings.config.params)
    own, items = settings.held_out.holds_out, settings.evaluate.items
    keys = item_keys_of(env)
    split = settings.held_out.split(keys, record) if own else None
    tasks = range(min(items, len(env))) if split is None else split.tasks.tolist()
    judged = can_be_judged(env, settings.scoring)
    obstacle = env.begin_evaluation() if judged and tasks else None
    evaluable = judged and obstacle is None
    scorer = success_scorer(env, name, settings.config, settings.scoring, run=settings.run)
    return EvaluatedEnv(
        name,
        env,
        settings.config,
        tasks if evaluable else (),
        scorer,
        [int(keys[task] >> np.uint64(11)) for task in tasks] if evaluable else (),
        judged,
        0 if split is None else split.withheld,
        items if own else None,
        settings.evaluate.samples,
        settings.seed,
        obstacle,
    )
