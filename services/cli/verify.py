"""`lachesis verify`: checks raters, advantages and the loss numerically on recorded rollouts."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated

import anyio
import typer

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.offline.verification.checks import (
    NumericFinding,
    accuracy,
    advantage_stability,
    determinism,
    distribution,
)
from lachesis.pipeline.runtime.rollouts import read_rollout
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.scorer.loader import load_members
from lachesis.pipeline.scorer.logic.aggregate import Ensemble
from lachesis.pipeline.scorer.rater import Rating, Sample
from lachesis.pipeline.scorer.runner import EnsembleRunner
from lachesis.pipeline.scorer.scorer import samples_of
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.ledger import GroupRef
from lachesis.schemas.rollout import RolloutGroup
from lachesis.services.cli.findings import exit_with, print_findings
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.output import print_json
from lachesis.services.run.connect import open_history
from lachesis.services.run.losses import warn_of_losses

__all__ = ["verify"]

_OF_VERDICTS = {"majority", "dawid_skene"}


@with_options
def verify(
    options: Options,
    groups: Annotated[int, typer.Option(min=1, help="Newest recorded groups to verify with.")] = 32,
    runs: Annotated[int, typer.Option(min=2, help="Times that each sample is rated.")] = 3,
    atol: Annotated[
        float, typer.Option(min=0.0, help="Largest difference at which two ratings count as equal.")
    ] = 1e-6,
    as_json: Json = False,
) -> None:
    """Check raters, advantages and the loss numerically on recorded rollouts; exit with 1 on failure."""
    config = options.config()
    recorded = anyio.run(_recorded, config, groups)
    if not recorded:
        raise ConfigError(f"run {config.run} has no rollouts to verify with; start it, or name another with --run")
    findings: list[NumericFinding] = []
    by_env: defaultdict[str, list[RolloutGroup]] = defaultdict(list)
    for group in recorded:
        by_env[group.env].append(group)
    for env, of_env in by_env.items():
        settings = config.environments.get(env)
        scoring = (settings.scoring if settings else None) or config.scoring
        if scoring.raters:
            findings += anyio.run(_raters, config, scoring, of_env, runs, atol)
    findings += _loss(config, recorded)
    if as_json:
        print_json(findings)
    else:
        print_findings(findings)
    exit_with(findings)


async def _recorded(config: RunConfig, count: int) -> list[RolloutGroup]:
    async with open_history(config, f"{config.run}.verify") as bus:
        await warn_of_losses(bus, config)
        return await _newest(bus, config.run, count)


async def _newest(bus: Bus, run: str, count: int) -> list[RolloutGroup]:
    seqs = []
    async with bus.read(subjects.ROLLOUTS, [subjects.rollout(run)], headers_only=True, follow=False) as messages:
        async for message in messages:
            seqs.append(message.seq)
            del seqs[:-count]
    found = []
    async for message in bus.fetch(subjects.ROLLOUTS, seqs):
        try:
            found.append(read_rollout(message).group)
        except DataError:
            continue  # a stage has dead-lettered it
    return found


async def _raters(
    config: RunConfig, scoring: ScoringConfig, groups: list[RolloutGroup], runs: int, atol: float
) -> list[NumericFinding]:
    """Rate the groups of one environment several times."""
    members = load_members(scoring.raters)
    runner = EnsembleRunner(members)
    samples = [found for group in groups if (found := _samples(group))]
    if not samples:
        text = f"not checked: none of {len(groups)} groups has texts to rate"
        return [NumericFinding(check="raters", subject=groups[0].env, verdict="warn", text=text)]
    passes = []
    scores: list[list[float | None]] = []
    calibrated: defaultdict[str, list[float | None]] = defaultdict(list)
    ensemble = Ensemble([member.describe() for member in members], scoring)
    for i in range(runs):
        columns: defaultdict[str, list[float | None]] = defaultdict(list)
        for of_group in samples:
            ratings: Mapping[str, list[Rating]] = await runner.rate_group(of_group)
            for rater, column in ratings.items():
                columns[rater] += [rating.value for rating in column]
            if i == 0:
                scored = ensemble.score(ratings)
                scores.append(list(scored.scores))
                for rater, values in scored.ratings.items():
                    calibrated[rater] += values
        passes.append(dict(columns))
    lengths = [[sample.token_count for sample in of_group] for of_group in samples]
    return [
        *determinism(passes, atol=atol),
        *distribution(passes[0], {member.name: member.bounds for member in members}),
        *(accuracy(calibrated, scoring.threshold) if ensemble.aggregation in _OF_VERDICTS else []),
        advantage_stability(scores, config.advantage_of(groups[0].env), lengths),
    ]


def _samples(group: RolloutGroup) -> list[Sample]:
    """Return what raters see of a group, nothing of one that came without texts."""
    try:
        return samples_of(group)
    except DataError:
        return []


def _loss(config: RunConfig, groups: list[RolloutGroup]) -> list[NumericFinding]:
    """Compare the loss in float32 and bfloat16, where there are torch and a model."""
    if config.model is None:
        return [NumericFinding(check="loss", subject="-", verdict="warn", text="not checked: the run names no model")]
    try:
        from lachesis.pipeline.common.trainability import TrainerLimits
        from lachesis.pipeline.model.policy import ModelSetup, load_model
        from lachesis.pipeline.model.tensors import vocabulary_of
        from lachesis.pipeline.offline.verification.checks import loss_agreement
        from lachesis.pipeline.trainer.agreement import losses
        from lachesis.pipeline.trainer.packed_batch import pack
        from lachesis.pipeline.trainer.sequences import select_trainable
    except ModuleNotFoundError as error:
        text = f"not checked: needs {error.name}; {install_command('train')}"
        return [NumericFinding(check="loss", subject="-", verdict="warn", text=text)]
    setup = ModelSetup(
        tokenizer=config.tokenizer, chat_template=config.chat_template, exceptions=tuple(config.model_exceptions)
    )
    policy = load_model(config.model, setup)
    payloads = []
    for group in groups[-8:]:
        n = group.sequences.n_samples
        ref = GroupRef(
            group=group.id,
            seq=1,
            env=group.env,
            sequences=n,
            tokens=group.sequences.n_tokens,
            policy_step=0,
            advantages=[1.0 if i % 2 else -1.0 for i in range(n)],  # what they are does not matter here
        )
        payloads.append((ref, group, None))
    selected = select_trainable(
        payloads, TrainerLimits(policy.tokenizer_hash, vocabulary_of(policy.model), config.training.reads)
    )
    if not selected.sequences:
        why = next(iter(selected.dropped.values()), "there is none")
        return [
            NumericFinding(
                check="loss", subject="-", verdict="warn", text=f"not checked: no group can be trained: {why}"
            )
        ]
    batch = pack(selected.sequences, pad_id=policy.tokenizer.pad_token_id or 0)
    return [loss_agreement(*losses(policy, batch, config.training.learner))]
