"""Runs the health checks of rewards in a loop of your own, from the plain scores of its groups. Pure."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from lachesis.pipeline.common.number_arguments import listed, number_column, number_columns, table_of, whole_number
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.pipeline.library.reward_normalizer import MAX_ABS_REWARD
from lachesis.pipeline.normalizer.estimators.centred import Centred
from lachesis.schemas.alerts import Alert
from lachesis.schemas.annotations import GroupReward, GroupScore
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["HealthChecks"]

_OWN_ADVANTAGES = "own"
"""Names the estimator of advantages that the loop gives: like a user's own, it has no bound that could be checked."""


class HealthChecks:
    """The checks of one environment: they evaluate each window of groups, and remember earlier ones."""

    def __init__(self, **settings: Any) -> None:
        """Begin without a group. `settings` are those of `HealthConfig`: `window`, `off`, `score_low`, `score_high`.

        Raises `ConfigError` on another one.
        """
        try:
            self._config = HealthConfig(**settings)
        except TypeError as error:
            raise ConfigError(f"health checks: {error}") from error
        self._monitor = EnvMonitor(self._config)
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

        Advantages that are given may be of any estimator, so only their skewness is checked.

        Returns the results of the window that it fills, else nothing; healthy findings are left out. Raises `DataError`
        on columns of different lengths, or numbers that are none; then nothing is counted.
        """
        found = number_column("score", scores, largest=MAX_ABS_REWARD)
        rated = number_columns("rating", {} if ratings is None else ratings, largest=MAX_ABS_REWARD)
        tokens = [] if lengths is None else [whole_number("a length", one) for one in listed("length", lengths)]
        centred = Centred().advantages(found)
        gains: Sequence[float | None] = centred.advantages
        if advantages is not None:
            gains = number_column("advantage", advantages, largest=MAX_ABS_REWARD)
        columns: dict[str, Sequence[float | None]] = {"advantages": gains, **rated}
        if lengths is not None:
            columns["lengths"] = tokens
        for name, column in columns.items():
            if len(column) != len(found):
                raise DataError(f"{name}: {len(column)} for {len(found)} scores")
        if not isinstance(item, str | Integral):
            raise DataError(f"item is {item!r:.80}; give its name")
        step = whole_number("step", step)
        self._groups += 1
        of_group: dict[str, Any] = {
            "group": f"{self._groups:032x}",
            "seq": self._groups,
            "item": str(item),
            "policy_step": step,
        }
        self._monitor.score(
            GroupScore(
                **of_group,
                scores=found,
                ratings=rated,
                lengths=tokens,
            )
        )
        self._monitor.reward(
            GroupReward(
                **of_group,
                verdict=centred.verdict,
                scores=found,
                rewards=found,
                advantages=list(gains),
                snapshot="-",
                mean=centred.mean,
                std=centred.std,
                range=centred.range,
                n_valid=centred.n_valid,
            ),
            Centred.name if advantages is None else _OWN_ADVANTAGES,
        )
        if not self._monitor.window_full:
            return []
        return [one for one in self._monitor.evaluate() if one.severity not in {"idle", "ok"}]

    def state_dict(self) -> dict[str, Any]:
        """Return the checks' state, in a form that msgpack can hold."""
        return {"monitor": self._monitor.state_dict(), "groups": self._groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises `DataError` on anything else; then nothing has changed.
        """
        monitor = EnvMonitor(self._config)
        try:
            saved = table_of("state of health checks", state)
            groups = whole_number("groups", saved["groups"])
            monitor.load_state_dict(saved["monitor"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"state of health checks: {error!r:.200}; give what `state_dict` returned") from error
        self._monitor, self._groups = monitor, groups
