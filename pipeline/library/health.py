"""Runs the health checks of rewards in a loop of your own, from the plain scores of its groups. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.schemas.alerts import Alert
from lachesis.schemas.annotations import GroupReward, GroupScore
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["HealthChecks"]


class HealthChecks:
    """The checks of one environment: they evaluate each window of groups, and remember earlier ones."""

    def __init__(self, **settings: Any) -> None:
        """Begin without a group. `settings` are those of `HealthConfig`: `window`, `off`, `score_low`, `score_high`.

        Raises `ConfigError` on another one.
        """
        try:
            self._monitor = EnvMonitor(HealthConfig(**settings))
        except TypeError as error:
            raise ConfigError(f"health checks: {error}") from error
        self._groups = 0

    def add_group(
        self,
        scores: Sequence[float | None],
        *,
        lengths: Sequence[int] | None = None,
        ratings: Mapping[str, Sequence[float | None]] | None = None,
        advantages: Sequence[float | None] | None = None,
        item: str = "",
        step: int = 0,
    ) -> list[Alert]:
        """Take in a group by the scores of its samples; advantages are score - mean unless given.

        Returns the results of the window that it fills, else nothing; healthy findings are left out. Raises `DataError`
        on columns of different lengths, or numbers that are none.
        """
        columns = {"lengths": lengths, "advantages": advantages, **(ratings or {})}
        for name, column in columns.items():
            if column is not None and len(column) != len(scores):
                raise DataError(f"{name}: {len(column)} for {len(scores)} scores")
        try:
            known = [float(one) for one in scores if one is not None]
        except (TypeError, ValueError) as error:
            raise DataError(f"scores: {error}") from error
        if not all(map(math.isfinite, known)):
            raise DataError(f"scores: {known!r:.80} has a value that is no number; None is a missing one")
        mean = math.fsum(known) / len(known) if known else None
        std = None if mean is None else math.sqrt(math.fsum((one - mean) ** 2 for one in known) / len(known))
        if advantages is None:
            advantages = [None if one is None or mean is None else float(one) - mean for one in scores]
        self._groups += 1
        of_group: dict[str, Any] = {
            "group": f"{self._groups:032x}",
            "seq": self._groups,
            "item": item,
            "policy_step": step,
        }
        self._monitor.score(
            GroupScore(
                **of_group,
                scores=list(scores),
                ratings={rater: list(column) for rater, column in (ratings or {}).items()},
                lengths=list(lengths) if lengths is not None else [],
            )
        )
        self._monitor.reward(
            GroupReward(
                **of_group,
                verdict="unscorable" if not known else "trainable" if std else "zero_variance",
                scores=list(scores),
                rewards=list(scores),
                advantages=list(advantages),
                snapshot="-",
                mean=mean,
                std=std,
                range=max(known) - min(known) if known else None,
                n_valid=len(known),
            ),
            "grpo",
        )
        if not self._monitor.window_full:
            return []
        return [one for one in self._monitor.evaluate() if one.severity not in {"idle", "ok"}]

    def state_dict(self) -> dict[str, Any]:
        """Return the checks' state, in a form that msgpack can hold."""
        return {"monitor": self._monitor.state_dict(), "groups": self._groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self._monitor.load_state_dict(state["monitor"])
        self._groups = state["groups"]
