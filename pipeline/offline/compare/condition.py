"""Conditions on a comparison's metrics, as `--fail-if` takes them: METRIC OP NUMBER, nothing else.

Pure.
"""

import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from lachesis.schemas.errors import ConfigError

__all__ = ["Condition", "parse_condition"]

_FORM = re.compile(
    r"\s*([a-z_]+)\s*(<=|>=|==|!=|<|>)\s*([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?)\s*"
)
_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """What must not hold."""

    metric: str
    sign: str
    number: float

    def failure(self, metrics: Mapping[str, float | None]) -> str | None:
        """Return why the comparison fails, None if it does not.

        What is undefined cannot be vouched for, and fails.
        """
        value = metrics[self.metric]
        if value is None:
            return (
                f"{self.metric} is undefined here, so it is not known whether {self.metric} {self.sign} {self.number:g}"
            )
        if _OPERATORS[self.sign](value, self.number):
            return f"{self.metric} is {value:.6g}, and {self.metric} {self.sign} {self.number:g} was to fail"
        return None


def parse_condition(text: str, metrics: Collection[str]) -> Condition:
    """Return the condition. Raises `ConfigError` on anything but METRIC OP NUMBER with one of `metrics`."""
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ConfigError(f'--fail-if {text!r:.80}: write METRIC OP NUMBER, "sign_flips>0.05" say; OP: < <= > >= == !=')
    metric, sign, number = found.groups()
    if metric not in metrics:
        raise ConfigError(f"--fail-if: there is no metric {metric!r}; there are {', '.join(metrics)}")
    return Condition(metric, sign, float(number))
