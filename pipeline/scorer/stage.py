"""The scorer: turns rollout groups into scores, through the stateless stage runtime.

The ensemble of each environment scores its groups, or else the run's ensemble; from a promotion on, the promoted
revision's. If an environment has no ensemble, its groups are scored by the rewards that the environment itself gave. A
group without ensemble and rewards becomes a dead letter, because it can never be scored.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import anyio
import msgspec

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.call_times import LOOK_S
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.common.trainability import TrainerLimits, TrainerReads, why_nothing_to_train, why_untrainable
from lachesis.pipeline.errors import DamagedError, InfrastructureError
from lachesis.pipeline.promotion.record import ActivePromotion
from lachesis.pipeline.runtime.retries import RetryWait
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stateless import StatelessStage, StoredRollout, run_stateless
from lachesis.pipeline.scorer.fixed_samples import FixedSampleSet
from lachesis.pipeline.scorer.logic.excerpts import excerpts_of
from lachesis.pipeline.scorer.logic.rating_figures import RaterAgreement
from lachesis.pipeline.scorer.logic.signals import signals_of
from lachesis.pipeline.scorer.promoted import admit_promoted
from lachesis.pipeline.scorer.runner import RaterCalls
from lachesis.pipeline.scorer.scorer import EnvironmentScorer, load_scorer
from lachesis.pipeline.scorer.settings import ScorerSettings
from lachesis.schemas import keys
from lachesis.schemas.annotations import GroupScore, ScoreEvent, Stamp
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import ConfigError, DataError, SchemaError
from lachesis.schemas.promotion import Promotion

__all__ = ["run_scorer"]

log = logging.getLogger("lachesis")

_POLICY_EVERY_S = 1.0
_UNRATED_GROUPS = 3
"""Groups in a row without any rating of a rater, after which it is named."""
_NOT_TRAINED_ON = "Answers without a score are not trained on, so what is learned is a selection"
_LATE_CURE = "look at what it calls; in a thread, py-spy shows where it stands"
_AGREEMENT_EVERY_GROUPS = 8
"""Groups from one look at how far raters agree to the next."""


class _ScoredGroup(NamedTuple):
    score: GroupScore
    by: EnvironmentScorer
    promoted: int | None


async def run_scorer(service: Service, settings: ScorerSettings) -> None:
    """Run one replica of the scorer until the service drains.

    Raises `ConfigError` when a rater cannot be loaded, or advantages need the ratings of one that there is not.
    """
    await service.starts_with("loading raters")
    report = service.report_wait
    shared = EnvironmentScorer(settings.scoring, None, explains=True, has_controls=True, report=report)
    scorers = {
        env: load_scorer(one, env, explains=True, has_controls=True, report=report)
        for env, one in settings.environments.items()
    }
    limits = _Limits(service, settings.reads)
    agreement: defaultdict[tuple[str, int | None], RaterAgreement] = defaultdict(RaterAgreement)
    in_force = ActivePromotion(service.bus, service.run, service.revision)
    promoted: dict[tuple[int | None, str], EnvironmentScorer] = {}

    def scorer_of(env: str, promotion: Promotion | None) -> EnvironmentScorer:
        if promotion is None:
            return scorers.get(env, shared)
        key = promotion.first, env
        if key not in promoted:
            promoted[key] = _promoted(promotion, settings, env, report) or scorers.get(env, shared)
        return promoted[key]

    unrated = _UnratedReport(service)
    fixed: dict[str, FixedSampleSet] = {}

    async def handle(rollout: StoredRollout) -> _ScoredGroup:
        env = rollout.group.env
        promotion = await in_force.promotion_at(rollout.seq)
        try:
            scorer = scorer_of(env, promotion)
            score = await scorer.score(rollout.group, rollout.seq)
        except InfrastructureError as error:
            service.vitals.metrics[f"reward/{env}/raters_away"] = 1.0
            later = await in_force.giving_up_promotion(rollout.seq)
            if later is not None:
                raise DataError(f"given up, as revision {later.revision} was promoted: {error}") from error
            raise
        service.vitals.metrics[f"reward/{env}/raters_away"] = 0.0
        unrated.report(env, scorer)
        service.vitals.metrics[f"reward/{env}/control_ratings"] = float(scorer.control_ratings)
        signals = msgspec.structs.replace(
            signals_of(rollout.group.sequences, rollout.group.generation),
            untrainable=why_untrainable(rollout.group, await limits.current()) or why_nothing_to_train(rollout.group),
            excerpts=excerpts_of(rollout.group) if settings.excerpts else None,
        )
        if env not in fixed:
            own = settings.environments.get(env)
            fixed[env] = FixedSampleSet(service, env, (own.scoring if own else settings.scoring).fixed_samples)
        again = await fixed[env].rate(rollout.group, score, scorer)
        service.vitals.metrics[f"reward/{env}/fixed_ratings"] = float(scorer.fixed_ratings)
        score = msgspec.structs.replace(score, signals=signals, fixed=again)
        scored = _ScoredGroup(score, scorer, promotion.first if promotion else None)
        agreement[env, scored.promoted].add_group(scored.score)
        if service.vitals.handled % _AGREEMENT_EVERY_GROUPS == 0:
            service.vitals.metrics |= agreement[env, scored.promoted].metrics(env)
        return scored

    def event(env: str, groups: list[_ScoredGroup]) -> ScoreEvent:
        scorer = groups[0].by
        return ScoreEvent(
            run=service.run,
            env=env,
            revision=service.revision,
            ensemble=scorer.digest,
            raters=scorer.versions,
            groups=[group.score for group in groups],
            promoted=groups[0].promoted,
        )

    def stamp(item: _ScoredGroup, times: Stamp) -> _ScoredGroup:
        return item._replace(score=msgspec.structs.replace(item.score, stamps=[times]))

    async with background() as tasks:
        tasks.start_soon(_report_late, service, lambda: [shared, *scorers.values(), *promoted.values()])
        await run_stateless(
            service,
            StatelessStage(
                kind="score",
                handle=handle,
                event=event,
                stamp=stamp,
                kind_of=lambda item: item.promoted,
                concurrency=settings.scoring.groups_at_once,
                patience_s=settings.scoring.patience_s,
            ),
        )


async def _report_late(service: Service, scorers: Callable[[], Sequence[EnvironmentScorer]]) -> None:
    """Report regularly which raters take much longer than usual. Runs until cancelled."""
    named: set[str] = set()
    while True:
        found: dict[str, RaterCalls] = {}
        for scorer in dict.fromkeys(scorers()):
            found |= scorer.find_late(anyio.current_time())
        for rater, calls in found.items():
            service.set_problem(
                f"{rater} late", f"rater {rater} does not answer", why=calls.text, mend=_LATE_CURE,
                held_up=("normalizer", "trainer"), stops=calls.are_all,
            )  # fmt: skip
        for rater in named - found.keys():
            service.set_problem(f"{rater} late", None)
        named = set(found)
        await sleep_until_tick(LOOK_S)


class _UnratedReport:
    """Names raters that rated no answer of the last groups, or that fail on many answers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._named: defaultdict[str, set[str]] = defaultdict(set)

    def report(self, env: str, scorer: EnvironmentScorer) -> None:
        """Report in the heartbeat which raters of `env` rate nothing, and withdraw outdated reports."""
        found = {rater: f"{why}. {_NOT_TRAINED_ON}" for rater, why in scorer.unrated.failing().items()}
        for rater, why in scorer.unrated.without_rating(_UNRATED_GROUPS).items():
            found[rater] = f"{why}. Groups without scores are not trained on"
        for rater, why in found.items():
            what = f"rater {rater}" if scorer.versions else f"reward {rater}"
            self._service.set_problem(f"{env} {rater} unrated", f"environment {env}, {what}: {why}")
        for rater in self._named[env] - found.keys():
            self._service.set_problem(f"{env} {rater} unrated", None)
        self._named[env] = set(found)


class _Limits:
    """The limits of the run's trainer, from the policy that it published; polled each second until found."""

    def __init__(self, service: Service, reads: TrainerReads | None) -> None:
        self._service = service
        self._reads = reads
        self._limits = TrainerLimits(reads=reads)
        self._known = False
        self._next_s = float("-inf")

    async def current(self) -> TrainerLimits:
        """Return the limits. Raises `InfrastructureError` while they cannot be read."""
        if self._known or anyio.current_time() < self._next_s:
            return self._limits
        self._next_s = anyio.current_time() + _POLICY_EVERY_S
        try:
            entry = await self._service.bus.value(keys.POLICY)
            policy = decode(PolicyRecord, entry.value) if entry is not None else None
        except (SchemaError, DamagedError) as error:  # no group is to blame; its limits go unchecked here
            log.warning("the policy record cannot be read: %s", error)
        else:
            if policy is not None:
                self._limits, self._known = TrainerLimits.of(policy, self._reads), True
        return self._limits


def _promoted(
    promotion: Promotion, settings: ScorerSettings, env: str, report: Callable[[RetryWait], None]
) -> EnvironmentScorer | None:
    """Return the scorer of `env` under a promotion. Raises `InfrastructureError`: where its raters cannot be loaded,
    groups wait until they can."""
    if env not in settings.environments or env not in promotion.environments:
        return None
    try:
        one = settings.promoted(promotion)[env]
        scoring = msgspec.structs.replace(
            admit_promoted(one.scoring, settings.named), controls=settings.environments[env].scoring.controls
        )
        return EnvironmentScorer(scoring, one, one.shaping, explains=True, has_controls=True, report=report)
    except ConfigError as error:
        raise InfrastructureError(f"revision {promotion.revision} is promoted and cannot be loaded: {error}") from error
