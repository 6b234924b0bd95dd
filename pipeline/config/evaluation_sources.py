"""Selects what a run evaluates: the `[evaluation]` environments, or a held-out share of its own tasks."""

from collections.abc import Mapping

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.evaluator.schedule import EvaluableSteps
from lachesis.pipeline.tasks.held_out import HeldOutRule, HeldOutSplit
from lachesis.pipeline.tasks.item_keys import Keys
from lachesis.schemas.control import HeldOutRecord

__all__ = [
    "evaluable_steps",
    "evaluated_environments",
    "evaluation_names",
    "held_out_rule",
    "held_out_tasks",
    "is_held_out",
    "reason_not_evaluated",
]


def evaluated_environments(config: RunConfig) -> Mapping[str, EnvironmentConfig]:
    """Return the environments that the evaluator evaluates, by name; none if the run has no evaluation."""
    if config.evaluation:
        return config.evaluation
    if reason_not_evaluated(config) is not None:
        return {}
    return {name: env for name, env in config.environments.items() if not env.is_foreign}


def evaluation_names(config: RunConfig) -> list[str]:
    """Return the environments with evaluations to read; "*" for a run of which only the name is known."""
    return list(evaluated_environments(config)) or ([] if config.environments else ["*"])


def is_held_out(config: RunConfig, env: str) -> bool:
    """Whether tasks of the environment are kept out of training, and evaluated instead."""
    return not config.evaluation and env in evaluated_environments(config)


def held_out_rule(config: RunConfig, env: str) -> HeldOutRule:
    """Return how the held-out tasks of an environment are chosen."""
    if not is_held_out(config, env):
        return HeldOutRule()
    return HeldOutRule(config.seed, config.evaluate.held_out, config.evaluate.items)


def held_out_tasks(config: RunConfig, env: str, keys: Keys, record: HeldOutRecord | None = None) -> HeldOutSplit:
    """Return the held-out tasks of an environment, given the keys of all its tasks; often none.

    `record`: what earlier starts of the run held out; None: there is no record, or it does not matter here.
    """
    return held_out_rule(config, env).split(keys, record)


def evaluable_steps(config: RunConfig) -> EvaluableSteps:
    """Return the steps whose policies can be evaluated."""
    if config.weights.transport != "shared_memory":
        return EvaluableSteps()
    every = config.evaluate.every_steps if evaluated_environments(config) else None
    return EvaluableSteps(every, config.training.steps)


def reason_not_evaluated(config: RunConfig) -> str | None:
    """Return why a run has no held-out evaluation, and how to get one; None if it has."""
    if config.evaluation:
        return None
    name = "[evaluation.NAME], with the settings of an environment,"
    if config.evaluate.held_out == 0:
        return f"evaluate.held_out is 0; raise it, or add {name} to evaluate on other tasks"
    if config.mode == "observe":
        return f"mode is observe, so the trainer is another's; add {name} to evaluate what it publishes"
    policy = config.role("policy")
    if (policy.url is not None or not policy.spec.is_light) and "eval" not in config.inference:
        return (
            "the policy is served by vLLM or an existing server, and a second one for evaluation would take as much "
            "again; add [inference.eval] to have one"
        )
    if all(env.is_foreign for env in config.environments.values()):
        return f"the run itself draws no environment's tasks (clients elsewhere do); add {name} for evaluation"
    return None
