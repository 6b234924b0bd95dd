"""`lachesis dev ENV`: one trip from a task to an optimizer step, in this process, without a broker.

Every part is the one that the services run; only the log between them is left out. No threads of ours, no child
processes: a breakpoint anywhere stops where it stands.
"""

import httpx
import torch
from rich.console import Console
from rich.table import Table

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environments.config import CollectConfig
from lachesis.pipeline.environments.environment import Environment
from lachesis.pipeline.environments.load import load_environment
from lachesis.pipeline.environments.rollout import build_group, collect_group
from lachesis.pipeline.evaluation.plan import held_out_tasks
from lachesis.pipeline.inference.app import build_app
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.engine import Engine
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.policy import PolicyModel, load_model
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.rewards.estimators.estimator import GroupAdvantage
from lachesis.pipeline.rewards.logic.advantage import group_advantage
from lachesis.pipeline.scoring.scorer import EnvironmentScorer, samples_of
from lachesis.pipeline.tasks.task import Task
from lachesis.pipeline.trainability import TrainerLimits
from lachesis.pipeline.training.batch import pack
from lachesis.pipeline.training.learner import Learner
from lachesis.pipeline.training.sequences import training_sequences
from lachesis.schemas.annotations import GroupScore
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.ledger import GroupRef
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["run_dev"]


async def run_dev(config: RunConfig, name: str, index: int, console: Console) -> bool:
    """Generate one group of task `index`, rate it, and take one optimizer step on it; print all of it.

    Return whether there was anything to train on.
    """
    settings = config.environments.get(name)
    if settings is None:
        raise ConfigError(f"environments.{name}: not configured; known: {', '.join(config.environments) or 'none'}")
    if config.model is None:
        raise ConfigError("model: not set; name a local folder or a Hugging Face id")
    env = load_environment(settings.kind, settings.params)
    if not 0 <= index < len(env):
        raise ConfigError(f"--task {index}: environment {name} has the tasks 0 to {len(env) - 1}")
    if index in held_out_tasks(config, name, len(env)):
        console.print(f"task {index} is held out for evaluation: a run does not train on it (evaluate.held_out)")
    torch.set_num_threads(config.training.threads)
    policy = load_model(config.model)
    group = await _generate(config, name, env, env.task(index), policy)
    score = await EnvironmentScorer(settings.scoring or config.scoring, settings).score(group, seq=1)
    advantage = group_advantage(score.scores, config.advantage_of(name), score.lengths, score.ratings)
    _show(console, group, score, advantage)
    if advantage.verdict != "trainable":
        mend = "see above why" if advantage.verdict == "unscorable" else "try another --task, or another rater"
        console.print(f"verdict {advantage.verdict}: nothing to train on; {mend}")
        return False
    ref = GroupRef(
        group=group.id,
        seq=1,
        env=name,
        sequences=len(group.sequences),
        tokens=group.sequences.n_tokens,
        policy_step=0,
        advantages=list(advantage.advantages),
    )
    learner = Learner(policy.model, config.training.learner)
    batch = pack(training_sequences(ref, group, None, TrainerLimits(policy.tokenizer_hash)))
    step = learner.step(batch)
    console.print(
        f"optimizer step: loss {step.loss:.4g}, grad norm {step.grad_norm:.3g}, entropy {step.entropy:.3g}, "
        f"{step.trainable_tokens} trainable tokens of {step.tokens}, {step.seconds:.2f} s"
    )
    return True


async def _generate(config: RunConfig, name: str, env: Environment, task: Task, policy: PolicyModel) -> RolloutGroup:
    settings = config.environments[name]
    version = policy_version(0, "dev", policy_tensors(policy.model))
    eos = policy.tokenizer.eos_token_id
    with Engine(policy.model, eos_token_id=eos, weight_version=str(version)) as engine:
        app = build_app(policy, engine, model_name="policy", weights_folder=config.path / "weights")
        transport = httpx.ASGITransport(app)
        async with InferenceClient(ClientConfig(url="http://in-process"), transport=transport) as client:
            sampling = SamplingParams(
                temperature=settings.temperature,
                top_p=settings.top_p,
                max_tokens=settings.max_new_tokens,
                seed=config.seed,
            )
            draft = await collect_group(
                env,
                task,
                client,
                settings.samples,
                sampling,
                config=CollectConfig(max_context=engine.max_model_len),
            )
    return build_group(
        draft,
        run=config.run,
        env=name,
        producer="dev",
        epoch=0,
        counter=0,
        tokenizer_hash=policy.tokenizer_hash,
    )


def _show(console: Console, group: RolloutGroup, score: GroupScore, advantage: GroupAdvantage) -> None:
    samples = samples_of(group)
    table = Table(title=f"{group.env}: {group.item}", caption=samples[0].prompt, caption_justify="left")
    for column in ("completion", *score.ratings, "score", "advantage", "tokens", "finish"):
        table.add_column(column)
    for i, sample in enumerate(samples):
        ratings = [_number(values[i]) for values in score.ratings.values()]
        row = [
            _number(score.scores[i]),
            _number(advantage.advantages[i]),
            str(sample.token_count),
            sample.finish_reason,
        ]
        table.add_row(sample.completion, *ratings, *row)
    console.print(table)


def _number(value: float | None) -> str:
    return "missing" if value is None else f"{value:.3f}"
