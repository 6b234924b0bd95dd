"""The data of a service's exported metrics, and example traces of its slow work. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import frexp
from typing import NamedTuple

from lachesis.schemas.control import StageVitals

__all__ = ["Exemplar", "Exemplars", "ServiceFigures"]


class Exemplar(NamedTuple):
    """A measured value, seconds, the trace it belongs to, and when it was measured, Unix ns."""

    value: float
    trace: str
    time_ns: int


class Exemplars:
    """The newest exemplar of each power of two: a handful, the rare slow ones among them."""

    def __init__(self) -> None:
        self._newest: dict[int, Exemplar] = {}

    def record(self, exemplar: Exemplar) -> None:
        self._newest[frexp(max(exemplar.value, 0.0))[1]] = exemplar

    def newest(self) -> list[Exemplar]:
        return list(self._newest.values())


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """One look at a service: what its heartbeat says, since `started_ns`, as of `now_ns`, both Unix ns."""

    stage: StageVitals
    metrics: Mapping[str, float]
    started_ns: int
    now_ns: int
    wait_exemplars: list[Exemplar] = field(default_factory=list)
    process_exemplars: list[Exemplar] = field(default_factory=list)
