"""The monitor of one environment: takes events in the order of their stream.

It returns every check's result, window by window.

Guarantees that results and standing are a function of the streams (and of resumptions): no clock, no arrival order. A
window of groups ends with the message that completes it, one of batches with the entry that does; `state_dict` holds
the state before the open windows, never a part of a window, so that a restart reads the open windows again and gets the
same results. Evaluations are checked one by one, each on arrival.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.advantages import AdvantageCheck
from lachesis.pipeline.health.logic.check import LADDER, MAX_EXAMPLES, Check, CheckResult, HealthWindow, RunSettings
from lachesis.pipeline.health.logic.collapse import CollapseCheck
from lachesis.pipeline.health.logic.drift import ChangePoint, RewardDrift, ScoreShift
from lachesis.pipeline.health.logic.entropy import Entropy
from lachesis.pipeline.health.logic.evaluations import HeldOutCheck
from lachesis.pipeline.health.logic.fractions import (
    FaultyGroupsCheck,
    NonFiniteCheck,
    SaturationCheck,
    TruncationCheck,
    ZeroVarianceCheck,
)
from lachesis.pipeline.health.logic.hacking import OverOptimisation, RaterAtOdds
from lachesis.pipeline.health.logic.length_hacking import LengthHacking
from lachesis.pipeline.health.logic.missing import MissingRatingsCheck
from lachesis.pipeline.health.logic.mode_collapse import ModeCollapse
from lachesis.pipeline.health.logic.outlying_groups import OutlyingGroups
from lachesis.pipeline.health.logic.rater_drift import RaterDrift
from lachesis.pipeline.health.logic.rater_saturation import RaterSaturation
from lachesis.pipeline.health.logic.rollout_training import RolloutTraining
from lachesis.pipeline.health.logic.sequential import SlowDrift, StepChange
from lachesis.pipeline.health.logic.spreading import LanguageCheck, PhraseCheck
from lachesis.pipeline.health.logic.staleness import StaleLengths, Staleness
from lachesis.pipeline.health.logic.step_size import StepSizeCheck
from lachesis.pipeline.health.logic.task_blindness import TaskBlindness
from lachesis.pipeline.health.logic.unconfirmed_gain import UnconfirmedGain
from lachesis.pipeline.health.logic.unpaid_bonuses import UnpaidBonuses
from lachesis.schemas.alerts import Alert, EnvironmentStanding, RolloutRange, Severity
from lachesis.schemas.annotations import DeadLetter, EvalEvent, GroupReward, GroupScore
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.ledger import GroupRef, Mismatch
from lachesis.schemas.values import convert_plain

__all__ = ["CHECKS", "LEDGER_CHECK", "SUSTAINED_WINDOWS", "EnvMonitor"]

SUSTAINED_WINDOWS = 3
"""Windows in a row after which a warning that can grow becomes a quarantine, and a quarantine a halt: nothing of what
is generated then is trained."""
_BATCHES = 8
"""Batches that are checked together."""
_EARLIER_WINDOWS = 4
"""Windows of groups that the next one is compared with; more where that many hold fewer than `_EARLIER_GROUPS`."""
_EARLIER_GROUPS = 128
_SPANS = 16
"""Lifted quarantines remembered, for a batcher that is behind them."""
_MAX_SEEN_GROUPS = 512
"""Rollouts at least that are remembered as scored: a score that is stored twice, by a redelivery, counts once."""


def _checks(config: HealthConfig) -> list[Check]:
    return [
        NonFiniteCheck(),
        MissingRatingsCheck(),
        FaultyGroupsCheck(),
        RewardDrift(),
        ScoreShift(),
        StepChange(),
        SlowDrift(),
        ChangePoint(),
        SaturationCheck(config.score_low, config.score_high),
        ZeroVarianceCheck(),
        TruncationCheck(),
        LengthHacking(),
        OverOptimisation(),
        RaterAtOdds(),
        AdvantageCheck(),
        Entropy(),
        ModeCollapse(),
        CollapseCheck(),
        UnconfirmedGain(),
        TaskBlindness(),
        RaterDrift(),
        RaterSaturation(),
        OutlyingGroups(),
        UnpaidBonuses(),
        PhraseCheck(),
        LanguageCheck(),
    ]


LEDGER_CHECK = "ledger"
"""The check of the ledger itself, the same for every environment: `health/ledger_reader.py` does it."""
_OF_BATCHES = (Staleness.name, RolloutTraining.name, StaleLengths.name, StepSizeCheck.name)
_OF_EXCERPTS = (PhraseCheck.name, LanguageCheck.name)
CHECKS = (*(check.name for check in _checks(HealthConfig())), *_OF_BATCHES, HeldOutCheck.name)
"""The names of all checks that judge environments."""


class _KeptState(msgspec.Struct):
    """What `EnvMonitor.state_dict` holds besides the states of the checks."""

    streaks: dict[str, tuple[int, int]]
    before: list[list[float]]
    seen: list[int]
    groups: int
    windows: dict[str, int]
    standing: EnvironmentStanding
    resumed: int
    promoted: int
    after: int
    evaluated_ns: int
    step_size: dict[str, Any]
    lag: int


class EnvMonitor:
    """`standing` follows from all results so far; `groups` counts those checked since the last resumption."""

    def __init__(self, config: HealthConfig, settings: RunSettings = RunSettings()) -> None:  # noqa: B008 - immutable
        for field, names, known in (
            ("off", config.off, (*CHECKS, LEDGER_CHECK)),
            ("halts", config.halts, CHECKS),
        ):
            for name in names:
                if name not in known:
                    raise ConfigError(f"health.{field}: there is no check {name[:80]!r}; there are {', '.join(known)}")
        self._config = config
        self._settings = settings
        self.resumed = 0
        self.promoted = 0
        self._after = 0
        self._held_out = HeldOutCheck()
        self._begin()

    def _begin(self) -> None:
        self._staleness = Staleness(self._settings.max_staleness)
        self._step_size = StepSizeCheck(self._settings.max_step_kl, self._settings.env)
        self._mismatch = RolloutTraining(self._settings)
        self._lengths = StaleLengths()
        self._streaks: dict[str, tuple[int, int]] = {}  # windows in a row at warn or worse, at quarantine or worse
        self._batches: list[GroupRef] = []
        self._batches_seen = 0
        self._lag = 0  # largest of the batches since steps were reported: a report covers several windows
        self.windows = {"groups": 0, "batches": 0}
        self.standing = EnvironmentStanding()
        self._begin_groups()

    def _begin_groups(self) -> None:
        off = {*self._config.off, *(() if self._config.excerpts else _OF_EXCERPTS)}
        self._checks = [check for check in _checks(self._config) if check.name not in off]
        window = self._config.window
        self._before: deque[list[float]] = deque(maxlen=max(_EARLIER_WINDOWS, math.ceil(_EARLIER_GROUPS / window)))
        self._seen: deque[int] = deque(maxlen=max(_MAX_SEEN_GROUPS, window))
        self._open = HealthWindow()
        self._scored: set[int] = set()
        self.groups = 0

    # what comes in

    def score(self, score: GroupScore) -> None:
        """Take in a group's score; of several the first stored counts."""
        if self._counts(score.seq) and score.seq not in self._seen and score.seq not in self._scored:
            self._scored.add(score.seq)
            self._open.scores.append(score)

    def reward(self, reward: GroupReward, estimator: str) -> None:
        """Take in a group's reward."""
        if self._counts(reward.seq):
            self._open.rewards.append(reward)
            self._open.estimator = estimator

    def dead(self, letter: DeadLetter) -> None:
        """Take in a dead letter: it counts if a group ended because of its content.

        A message that was not generated under a lease counts against no environment: any client may have stored it.
        """
        if not letter.ends_rollout or letter.kind == "deadline" or not letter.leased:
            return
        if self._counts(letter.seq):
            self._open.dead.append(letter.group or f"at sequence {letter.seq}")

    def _counts(self, seq: int) -> bool:
        return seq > self._after and seq >= self.promoted

    def batch(self, number: int, refs: Sequence[GroupRef]) -> None:
        """Take in the environment's part of batch `number`."""
        kept = [ref for ref in refs if ref.seq > self._after]
        self._batches_seen += bool(kept)
        self._batches += kept
        self._lengths.record_lengths([ref.tokens / ref.sequences for ref in kept if ref.sequences], [])
        for ref in kept:
            self._lag = max(self._lag, number - ref.policy_step)
            self._staleness.record_batch(number - ref.policy_step, number - ref.last_step, ref.group)

    def record_stale(self, lengths: Sequence[int]) -> None:
        """Take in groups that were dropped as stale, by the mean tokens of a sequence of each."""
        self._lengths.record_lengths([], lengths)

    def trained(self, steps: Sequence[Mismatch]) -> None:
        """Take in the trainer's figures of a report's steps."""
        self._step_size.record_steps(steps)
        self._mismatch.record_mismatch(steps)

    def remember(self, event: EvalEvent) -> None:
        """Take in an evaluation of before the state that was loaded, for later ones to be compared with."""
        self._held_out.remember(event)

    # results

    def judge_evaluation(self, event: EvalEvent) -> list[Alert]:
        """Check an evaluation; nothing comes of one that was checked before.

        The standing stays: only windows of groups and batches change that.
        """
        finding = self._held_out.evaluate(event)
        if finding is None or HeldOutCheck.name in self._config.off:
            return []
        return [self._result(HeldOutCheck.name, finding)]

    @property
    def window_full(self) -> bool:
        """Whether a window of groups is to be checked: it has as many as configured, or shows a collapse."""
        return self._open.groups >= self._config.window or any(check.ends_early(self._open) for check in self._checks)

    @property
    def batches_full(self) -> bool:
        """Whether batches are to be checked: eight are in, or the trainer reports too large a step."""
        seen = self._batches_seen
        if seen and self._step_size.ends_early and StepSizeCheck.name not in self._config.off:
            return True
        return seen >= _BATCHES

    def evaluate(self) -> list[Alert]:
        """Judge the open window of groups and begin the next."""
        window = self._open
        window.before = [value for means in self._before for value in means]
        results = [self._result(check.name, check.evaluate(window)) for check in self._checks]
        seqs = [item.seq for item in (window.scores or window.rewards)]
        self._before.append(window.means())
        self._seen.extend(score.seq for score in window.scores)
        self._open, self._scored = HealthWindow(), set()
        self.groups += window.groups
        self.windows["groups"] += 1
        self._stand(results, min(seqs, default=None), self.windows["groups"] - 1)
        return results

    def judge_batches(self) -> list[Alert]:
        """Judge the batches taken in since the last time."""
        examples = [ref.group for ref in self._batches[-MAX_EXAMPLES:]]
        step_size = self._step_size.evaluate(self._lag, examples)
        found = {
            Staleness.name: self._staleness.evaluate(),
            RolloutTraining.name: self._mismatch.evaluate(examples, self._step_size.explanation),
            StaleLengths.name: self._lengths.evaluate(),
            StepSizeCheck.name: step_size,
        }
        results = [self._result(name, finding) for name, finding in found.items() if name not in self._config.off]
        first = min((ref.seq for ref in self._batches), default=None)
        self._batches, self._batches_seen = [], 0
        if step_size.severity != "idle":
            self._lag = 0
        self.windows["batches"] += 1
        self._stand(results, first, self.windows["batches"] - 1)
        return results

    def resume(self, revision: int, after: int) -> None:
        """Lift the standing and start over with the rollouts after sequence `after`.

        `revision` numbers requests.

        What was quarantined up to `after` stays so.
        """
        lifted, diverted = self.standing, self.standing.diverted
        if lifted.quarantined_from is not None and lifted.quarantined_from <= after:
            diverted = [*diverted, RolloutRange(first=lifted.quarantined_from, last=after, cause=lifted.cause)]
        self.resumed, self._after = revision, after
        self._begin()
        self.standing = EnvironmentStanding(diverted=diverted[-_SPANS:])

    def promote(self, first: int) -> None:
        """Begin again with the rollouts from sequence `first` on, which another revision scores.

        Earlier baselines do not apply to them. The standing stays, and so does the state of batches: their age and the
        trainer's figures do not depend on the revision, and they come from another stream.
        """
        self.promoted = first
        lasting = (*_OF_BATCHES, HeldOutCheck.name)
        self._streaks = {name: streak for name, streak in self._streaks.items() if name in lasting}
        self.windows["groups"] = 0
        self._begin_groups()

    def _result(self, name: str, finding: CheckResult) -> Alert:
        severity = finding.severity
        if severity == "halt" and name not in self._config.halts:
            severity = finding.unhalted
        warned, quarantined = self._streaks.get(name, (0, 0))
        if severity != "idle":  # a window without anything to judge by neither clears nor confirms
            warned = warned + 1 if _at_least(severity, "warn") else 0
            if severity == "warn" and finding.grows and warned >= SUSTAINED_WINDOWS:
                severity = "quarantine"
            quarantined = quarantined + 1 if _at_least(severity, "quarantine") else 0
            if severity == "quarantine" and quarantined > SUSTAINED_WINDOWS:
                severity = "halt"
            self._streaks[name] = (warned, quarantined)
        return Alert(
            check=name,
            severity=severity if _at_least(self._config.act, severity) else self._config.act,
            value=finding.value,
            threshold=finding.threshold,
            reason=finding.reason,
            windows=warned,
            examples=list(finding.examples),
        )

    def _stand(self, results: Sequence[Alert], first: int | None, window: int) -> None:
        worst = max(results, key=lambda result: LADDER.index(result.severity), default=None)
        if worst is None or not _at_least(worst.severity, "quarantine"):
            return
        standing = self.standing
        if standing.quarantined_from is None and first is not None:
            standing = msgspec.structs.replace(standing, quarantined_from=first, cause=worst.check, since=window)
        if worst.severity == "halt" and not standing.halted:
            standing = msgspec.structs.replace(standing, halted=True, cause=worst.check, since=window)
        self.standing = standing

    # what is kept

    def state_dict(self) -> dict[str, Any]:
        """Return everything before the open windows, msgpack-able."""
        return {
            "version": 1,
            "checks": {check.name: check.state_dict() for check in self._checks},
            "streaks": self._streaks,
            "before": list(self._before),
            "seen": list(self._seen),
            "groups": self.groups,
            "windows": self.windows,
            "standing": msgspec.to_builtins(self.standing),
            "resumed": self.resumed,
            "promoted": self.promoted,
            "after": self._after,
            "evaluated_ns": self._held_out.judged_ns,
            "step_size": self._step_size.state_dict(),
            "lag": self._lag,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`. A check that was off then starts over."""
        self._begin()
        for check in self._checks:
            if check.name in state["checks"]:
                check.load_state_dict(state["checks"][check.name])
        kept = convert_plain("health state", _KeptState, state)
        self._streaks = kept.streaks
        self._before.extend(kept.before)
        self._seen.extend(kept.seen)
        self.groups, self.windows, self.standing = kept.groups, {**self.windows, **kept.windows}, kept.standing
        self.resumed, self._after, self.promoted = kept.resumed, kept.after, kept.promoted
        self._held_out.judged_ns = kept.evaluated_ns
        self._step_size.load_state_dict(kept.step_size)
        self._lag = kept.lag


def _at_least(severity: Severity, other: Severity) -> bool:
    return LADDER.index(severity) >= LADDER.index(other)
