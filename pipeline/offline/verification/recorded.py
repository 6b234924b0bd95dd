"""Checks recorded rollouts: rates them again, and computes the loss in two precisions."""

from collections import defaultdict
from collections.abc import Mapping

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.offline.verification.checks import (
    NumericFinding,
    accuracy,
    advantage_stability,
    determinism,
    distribution,
    loss_agreement,
)
from lachesis.pipeline.runtime.rollouts import read_rollout
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.scorer.loader import load_members
from lachesis.pipeline.scorer.logic.aggregate import Ensemble
from lachesis.pipeline.scorer.rater import Rating, Sample
from lachesis.pipeline.scorer.runner import EnsembleRunner
from lachesis.pipeline.scorer.scorer import samples_of
from lachesis.schemas import subjects
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import GroupRef
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["check_loss", "check_raters", "newest_groups"]

_OF_VERDICTS = {"majority", "dawid_skene"}


async def newest_groups(bus: Bus, run: str, count: int) -> list[RolloutGroup]:
    """Return the newest `count` rollouts of the run that can be read, the oldest first."""
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


async def check_raters(
    config: RunConfig, scoring: ScoringConfig, groups: list[RolloutGroup], runs: int, atol: float
) -> list[NumericFinding]:
    """Rate the groups of one environment `runs` times.

    `atol`: the largest difference at which two ratings count as equal.
    """
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
    """Return the samples of a group as raters see them; none of one that came without texts."""
    try:
        return samples_of(group)
    except DataError:
        return []


def check_loss(config: RunConfig, groups: list[RolloutGroup]) -> list[NumericFinding]:
    """Compare the loss in float32 and bfloat16, where there are torch and a model."""
    if config.model is None:
        return [NumericFinding(check="loss", subject="-", verdict="warn", text="not checked: the run names no model")]
    try:
        from lachesis.pipeline.common.trainability import TrainerLimits
        from lachesis.pipeline.model.policy import ModelSetup, load_model
        from lachesis.pipeline.model.tensors import vocabulary_of
        from lachesis.pipeline.trainer.dtype_comparison import losses
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
