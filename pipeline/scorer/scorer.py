"""Scores the groups of one environment.

The scores come from its raters and their ensemble, or are the rewards that the environment gave.

It turns a stored group into its `GroupScore`, without a bus. The scorer, a replay of history and `lachesis dev` all use
it, so the same group, ensemble and answers of the raters give the same bits everywhere.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from lachesis.pipeline.common.secret_texts import without_secrets
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.normalizer.logic.accumulator import MAX_ABS_VALUE
from lachesis.pipeline.runtime.retries import RetryWait
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.scorer.controls import OtherTasks, is_control
from lachesis.pipeline.scorer.loader import load_members
from lachesis.pipeline.scorer.logic.aggregate import Ensemble, EnsembleScores
from lachesis.pipeline.scorer.logic.bonus import ShapingSample, shape
from lachesis.pipeline.scorer.logic.unrated import UnratedGroups
from lachesis.pipeline.scorer.rater import Rating, Sample
from lachesis.pipeline.scorer.runner import EnsembleRunner, RaterCalls
from lachesis.pipeline.scorer.settings import EnvScoringSettings
from lachesis.pipeline.tasks.thoughts import OPENED_KEY, opened_thought
from lachesis.schemas.annotations import GroupScore, GroupShaping
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.rollout import Message, RolloutGroup

__all__ = ["EnvironmentScorer", "load_scorer", "sample_of", "samples_of"]

log = logging.getLogger("lachesis")

_MAX_REASONS = 64
"""Different reasons for missing ratings that one scorer logs."""
_MAX_DETAIL = 200
"""Characters of a rater's failure that a score carries."""
_ENVIRONMENT_ENSEMBLE = "environment"
"""Ensemble id of groups that their environment scored."""


_BOUNDED = f"an environment's rewards, and their sum, lie within +-{MAX_ABS_VALUE:g}: scale them"


@dataclass(frozen=True, slots=True)
class _RaterEnsemble:
    runner: EnsembleRunner
    ensemble: Ensemble


class SuccessRule(Protocol):
    """Which rater decides whether a sample succeeded (None: the score does), and from which rating on."""

    @property
    def success_rater(self) -> str | None: ...
    @property
    def success_threshold(self) -> float: ...


class EnvironmentScorer:
    """Scores the groups of one environment. `settings` None: success is read from the score itself. `explains`: scores
    say why ratings are missing. `has_controls`: some groups are rated for another task as well, as `scoring.controls`
    says. `report` is called before an unavailable rater is called again; without it, that is
    logged.

    `digest` names all that scores and bonuses depend on.
    """

    def __init__(
        self,
        scoring: ScoringConfig,
        settings: SuccessRule | None,
        shaping: RewardConfig | None = None,
        *,
        explains: bool = False,
        has_controls: bool = False,
        report: Callable[[RetryWait], None] | None = None,
    ) -> None:
        self._explains = explains
        self._control_share = scoring.controls if has_controls else 0.0
        self._other_tasks = OtherTasks()
        self.control_ratings = 0
        """Ratings of answers for another task so far."""
        self.fixed_ratings = 0
        """Ratings of fixed samples so far."""
        members = load_members(scoring.raters)
        self._ensemble = None
        if members:
            described = [member.describe() for member in members]
            self._ensemble = _RaterEnsemble(EnsembleRunner(members, report), Ensemble(described, scoring))
        self._success_rater = settings.success_rater if settings else None
        self._success_threshold = settings.success_threshold if settings else 1.0
        self._reported_reasons: set[str] = set()
        self.unrated = UnratedGroups()
        """Which raters, or rewards of the environment, have rated nothing for how many groups."""
        self.digest = self._ensemble.ensemble.digest if self._ensemble else _ENVIRONMENT_ENSEMBLE
        self.versions = self._ensemble.ensemble.versions if self._ensemble else {}
        self.rater_digests = self._ensemble.ensemble.rater_digests if self._ensemble else {}
        self._shaping = shaping if shaping is not None and shaping.on else None
        if self._shaping is not None:
            content = msgspec.json.encode((self.digest, self._shaping, self._min_success))
            self.digest = hashlib.blake2b(content, digest_size=12).hexdigest()

    @property
    def rates_samples(self) -> bool:
        """Whether any rater rates single samples, rather than those of a group together."""
        return self._ensemble is not None and self._ensemble.runner.rates_samples

    async def rate_fixed(self, sample: Sample, times: int) -> dict[str, list[float]]:
        """Return by rater what it gives a sample, so many times: a list without what fails."""
        if self._ensemble is None:
            return {}
        ratings = await self._ensemble.runner.rate_once([sample] * times)
        self.fixed_ratings += len(ratings) * times
        found = {
            name: [value for value in column if value is not None]
            for name, column in self._ensemble.ensemble.calibrate(ratings).items()
        }
        return {name: column for name, column in found.items() if column}

    @property
    def is_asynchronous(self) -> bool:
        """Whether scoring awaits anything, so that other groups could be scored meanwhile."""
        return self._ensemble is not None and self._ensemble.runner.is_asynchronous

    def find_late(self, now_s: float) -> dict[str, RaterCalls]:
        """Return rater name -> its calls, for raters that take much longer than usual; see `EnsembleRunner`."""
        return {} if self._ensemble is None else self._ensemble.runner.find_late(now_s)

    async def score(self, group: RolloutGroup, seq: int) -> GroupScore:
        """Return the scores of `group`, stored at `seq`.

        Raises `DataError` when nothing can score it, `InfrastructureError` while a rater that it needs is away.
        """
        samples: list[Sample] | None = None
        failures: dict[str, str] = {}
        figures: dict[str, list[float | None]] = {}
        controls: dict[str, list[float | None]] = {}
        if self._ensemble is not None:
            samples = samples_of(group)
            ratings = await self._ensemble.runner.rate_group(samples)
            for name, column in ratings.items():
                self.unrated.count(name, column, group.item)
            scores = self._ensemble.ensemble.score(ratings)
            figures = _figures(ratings)
            self._log_failures({name: ratings[name] for name in scores.statuses})
            self._wait_for_the_unavailable(ratings, scores.unscorable)
            if self._explains:
                failures = {name: _first_failure(ratings[name]) for name in scores.statuses}
            if self._control_share > 0:
                controls = await self._rate_controls(self._ensemble, group.id, samples, ratings)
        else:
            scores, problems = _own_rewards(group)
            for name, rewards in scores.ratings.items():
                self.unrated.count(name, [_as_rating(value, problems.get(name)) for value in rewards], group.item)
            for name, problem in problems.items():
                self._log_once(f"environment {group.env}, reward {name}: {problem}")
            if self._explains:
                failures = problems
        return GroupScore(
            group=group.id,
            seq=seq,
            item=group.item,
            policy_step=group.policy_step,
            scores=scores.scores,
            ratings=scores.ratings,
            figures=figures,
            controls=controls,
            lengths=group.sequences.lengths,
            index=group.dispatch.index if group.dispatch else None,
            skill=group.skill,
            statuses=scores.statuses,
            disagreement=scores.disagreement,
            success=self._success(scores),
            failures={name: text for name, text in failures.items() if text},
            shaping=self._shape(group, scores, samples),
            excluded=list(group.sequences.excluded_samples),
            turn_rewards=group.sequences.turn_rewards or [],
            turn_parents=group.sequences.turn_parents or [],
        )

    async def _rate_controls(
        self, by: _RaterEnsemble, group: str, samples: Sequence[Sample], own: Mapping[str, Sequence[Rating]]
    ) -> dict[str, list[float | None]]:
        """Return what the raters give the samples as answers to another task, if the group is chosen for that."""
        exchanged = self._other_tasks.exchange(samples) if is_control(group, self._control_share) else []
        self._other_tasks.remember(samples[0])
        if not exchanged:
            return {}
        ratings = await by.runner.rate_once(exchanged, own)
        self.control_ratings += sum(own[name][i].value is not None for name in ratings for i in range(len(samples)))
        found = by.ensemble.calibrate(ratings)
        return {name: column for name, column in found.items() if any(value is not None for value in column)}

    @property
    def _min_success(self) -> float:
        given = self._shaping.min_success if self._shaping else None
        return self._success_threshold if given is None else given

    def _shape(
        self, group: RolloutGroup, scores: EnsembleScores, samples: Sequence[Sample] | None
    ) -> GroupShaping | None:
        if self._shaping is None:
            return None
        generated, reasons = group.sequences.generated, group.sequences.endings
        completions = [""] * group.sequences.n_samples
        if self._shaping.format_markers:
            completions = [sample.text for sample in samples or samples_of(group)]
        shapeable = [
            ShapingSample(completions[i], generated.tokens[part], reasons[i], score, succeeded)
            for i, (part, score, succeeded) in enumerate(
                zip(generated.samples, scores.scores, self._succeeded(scores), strict=True)
            )
        ]
        return shape(shapeable, self._shaping, self._min_success)

    def _wait_for_the_unavailable(self, ratings: Mapping[str, list[Rating]], unscorable: Sequence[int]) -> None:
        """Raise `InfrastructureError` where samples are unscorable because a rater is away: no outcome of theirs.

        The group is then scored again, for as long as it takes: an outage stalls a run and costs it nothing.
        """
        for name, column in ratings.items():
            for i in unscorable:
                if column[i].status == "unavailable":
                    raise InfrastructureError(f"rater {name}: {column[i].detail}")

    def _log_failures(self, ratings: Mapping[str, list[Rating]]) -> None:
        """Log why ratings are missing, each reason once: the events carry the status alone."""
        for name, column in ratings.items():
            for rating in column:
                if rating.status not in {"ok", "abstain"}:
                    self._log_once(f"rater {name}: {rating.status}, {rating.detail}")

    def _log_once(self, reason: str) -> None:
        if reason not in self._reported_reasons and len(self._reported_reasons) < _MAX_REASONS:
            self._reported_reasons.add(reason)
            log.warning("%s", reason)

    def _succeeded(self, scores: EnsembleScores) -> list[bool | None]:
        """Return by sample whether it succeeded, None where the rating that determines it is missing."""
        values = scores.ratings.get(self._success_rater) if self._success_rater else scores.scores
        if values is None:
            return [None] * len(scores.scores)
        return [None if value is None else value >= self._success_threshold for value in values]

    def _success(self, scores: EnsembleScores) -> float | None:
        """Return the share of successes among the samples with a known result; None without any."""
        values = [value for value in self._succeeded(scores) if value is not None]
        return sum(values) / len(values) if values else None


def load_scorer(
    settings: EnvScoringSettings,
    env: str,
    *,
    explains: bool = False,
    has_controls: bool = False,
    report: Callable[[RetryWait], None] | None = None,
) -> EnvironmentScorer:
    """Return the scorer of an environment of a run.

    Raises `ConfigError` when a rater cannot be loaded, or a setting names a rater that the environment does not have.
    """
    scorer = EnvironmentScorer(
        settings.scoring, settings, settings.shaping, explains=explains, has_controls=has_controls, report=report
    )
    raters = list(scorer.versions)
    unknown = sorted(set(settings.weighted) - set(raters))
    if unknown and raters:
        raise ConfigError(
            f"environment {env}: advantage.weights names {', '.join(unknown)}; its raters are {', '.join(raters)}"
        )
    success = settings.success_rater
    if success is not None and raters and success not in raters:
        raise ConfigError(
            f"environments.{env}.success_rater is {success!r}, but its raters are {', '.join(raters)}: nothing "
            "says which samples succeed"
        )
    return scorer


def _figures(ratings: Mapping[str, Sequence[Rating]]) -> dict[str, list[float | None]]:
    """Return by `RATER/FIGURE` what raters say further of each sample, None where they say nothing of it."""
    found: dict[str, list[float | None]] = {}
    for rater, column in ratings.items():
        names = dict.fromkeys(name for rating in column for name in rating.figures or ())
        for name in names:
            found[f"{rater}/{name}"] = [
                None if rating.figures is None else rating.figures.get(name) for rating in column
            ]
    return found


def _first_failure(column: Sequence[Rating]) -> str:
    """Return in words why the first rating that should be there is not, empty where all are."""
    failed = (rating for rating in column if rating.status not in {"ok", "abstain"})
    return next((without_secrets(rating.detail)[:_MAX_DETAIL] or rating.status for rating in failed), "")


def samples_of(group: RolloutGroup) -> list[Sample]:
    """Return each sample as raters see it.

    The last assistant message is the completion, everything before it the prompt. Raises `DataError` if nothing can be
    rated.
    """
    if not group.messages:
        raise DataError("messages: empty, so raters have nothing to read")
    lengths, reasons = group.sequences.lengths, group.sequences.endings
    opened = opened_thought(str(group.metadata.get(OPENED_KEY, "")))
    return [
        sample_of(
            conversation,
            f"messages[{i}]",
            task=group.task,
            token_count=lengths[i],
            finish_reason=reasons[i],
            item=group.item,
            env=group.env,
            opened=opened,
        )
        for i, conversation in enumerate(group.messages)
    ]


def sample_of(conversation: Sequence[Message], where: str, **facts: Any) -> Sample:
    """Return a conversation as raters see it, with `facts` for the other fields.

    Raises `DataError`, which names `where` it stands, if no message is the assistant's.
    """
    last = len(conversation) - 1
    while last >= 0 and conversation[last].role != "assistant":
        last -= 1
    if last < 0:
        raise DataError(f"{where}: no assistant message, so there is nothing to rate")
    return Sample(
        prompt="\n".join([message.content for message in conversation[:last]]),
        completion=conversation[last].content,
        messages=msgspec.to_builtins(conversation),
        **facts,
    )


def _own_rewards(group: RolloutGroup) -> tuple[EnsembleScores, dict[str, str]]:
    """Return the sums of the rewards that the environment gave, and by component what is wrong with the first of it.

    As a rating outside its rater's bounds is missing, so is a reward beyond `MAX_ABS_VALUE`, which no statistic takes:
    its sample is unscorable, and the group's other samples are not touched.
    """
    components: Mapping[str, list[float | None]] = group.sequences.rewards
    if not components:
        raise DataError(f"env {group.env} gave no rewards and no raters are configured; set scoring.raters")
    ratings = {name: list(column) for name, column in components.items()}
    failures: dict[str, str] = {}
    scores: list[float | None] = []
    for i, values in enumerate(zip(*components.values(), strict=True)):
        present = {name: value for name, value in zip(components, values, strict=True) if value is not None}
        beyond = [name for name, value in present.items() if abs(value) > MAX_ABS_VALUE]
        score = sum(present.values())
        if not beyond and abs(score) > MAX_ABS_VALUE:
            beyond = list(present)  # none alone, but their sum
        for name in beyond:
            failures.setdefault(name, f"sample {i}: reward {present[name]:g}, score {score:g}; {_BOUNDED}")
            ratings[name][i] = None
        scores.append(score if len(present) == len(values) and not beyond else None)
    statuses = {
        name: [_reward_status(*pair) for pair in zip(components[name], ratings[name], strict=True)] for name in failures
    }
    unscorable = [i for i, score in enumerate(scores) if score is None]
    return EnsembleScores(scores, dict(ratings), statuses, None, unscorable), failures


def _as_rating(value: float | None, problem: str | None) -> Rating:
    if value is not None:
        return Rating(value)
    return Rating(None, "abstain" if problem is None else "error", problem or "")


def _reward_status(given: float | None, kept: float | None) -> str:
    if given is None:
        return "abstain"
    return "error" if kept is None else "ok"
