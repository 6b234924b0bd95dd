"""Checks whether there is a bonus for form that no sample earns."""

from collections.abc import Iterator, Mapping
from typing import Any

from lachesis.pipeline.health.logic.check import Check, CheckResult, HealthWindow
from lachesis.schemas.annotations import GroupScore, GroupShaping

__all__ = ["UnpaidBonuses"]

_MIN_GROUPS = 128
"""Groups in a row without a single sample, after which the check warns."""
_LENGTH = "length_bounty_max"
_MANY_TRUNCATED = 0.5


class UnpaidBonuses(Check):
    """A format marker that no sample has had in 128 groups or more, while bonuses are in force: warns, and names it.

    A bonus that no sample earns teaches nothing, and looks like one that is still to be learned. The same holds for the
    length bonus if it is the only one.
    """

    name = "unpaid_bonuses"

    def __init__(self) -> None:
        self._groups: dict[str, int] = {}  # by marker: groups in a row in which no sample had it
        self._truncated = self._samples = 0  # of the same groups

    def evaluate(self, window: HealthWindow) -> CheckResult:
        shaped = [(score, score.shaping) for score in window.scores if score.shaping is not None]
        if not shaped:
            return CheckResult("idle", reason="no reward_config")
        known: set[str] = set()
        for score, shaping in shaped:
            for marker, earned in _earned(shaping):
                known.add(marker)
                self._groups[marker] = 0 if earned else self._groups.get(marker, 0) + 1
            self._count(score)
        self._groups = {marker: groups for marker, groups in self._groups.items() if marker in known}
        most = max(self._groups.values())
        faded = [reward.shaping_scale for reward in window.rewards if reward.shaping_scale is not None][-1:] == [0.0]
        if most < _MIN_GROUPS or faded:
            return CheckResult("ok", most, _MIN_GROUPS)
        unpaid = sorted(marker for marker, groups in self._groups.items() if groups >= _MIN_GROUPS)
        return CheckResult("warn", most, _MIN_GROUPS, self._reason(unpaid, most), window.newest)

    def _reason(self, unpaid: list[str], groups: int) -> str:
        if unpaid == [_LENGTH]:
            what = f"no sample of the last {groups} groups earned anything of reward_config.{_LENGTH}"
            return f"{what}: lower reward_config.length_from, or remove the bonus"
        share = self._truncated / self._samples if self._samples else 0.0
        why = f" {share:.0%} of the samples are cut off before they get there: raise max_new_tokens;" if (
            share > _MANY_TRUNCATED
        ) else ""  # fmt: skip
        return (
            f"no sample of the last {groups} groups has {', '.join(unpaid)} of reward_config.format_markers, so it "
            f"teaches nothing:{why} ask for it in the prompt, correct its spelling (see a sample with "
            "`lachesis rollouts`), or remove it"
        )

    def _count(self, score: GroupScore) -> None:
        if not any(self._groups.values()):
            self._truncated = self._samples = 0
        if score.signals is not None:
            self._truncated += score.signals.truncated
            self._samples += len(score.scores)

    def state_dict(self) -> dict[str, Any]:
        return {"groups": self._groups, "truncated": self._truncated, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._groups = {str(marker): int(groups) for marker, groups in state["groups"].items()}
        self._truncated, self._samples = int(state["truncated"]), int(state["samples"])


def _earned(shaping: GroupShaping) -> Iterator[tuple[str, bool]]:
    """Yield each marker with whether a sample has it; without markers, the bonus for length."""
    for marker, had in shaping.markers.items():
        yield marker, any(had)
    if not shaping.markers:
        yield _LENGTH, any(shaping.length)
