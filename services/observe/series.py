"""Curves of a run over its optimizer steps, a bounded number of points each. No bus.

They are read from the log of figures in the run's folder.

`CurveReader` reads what was appended since its last call, so that a long log is read once. A run that went back to a
checkpoint continues its curves from there.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from lachesis.pipeline.common.small_files import open_regular_file
from lachesis.pipeline.trainer.tracking import METRICS_FILE
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import from_json

__all__ = ["Chart", "ChartLine", "CurveReader", "chart_values"]

MAX_POINTS = 500
"""Points of a line at most: beyond, pairs of neighbours are merged into their mean."""
_MAX_LINES = 12
"""Lines of a chart: environments or raters beyond are left out."""
_MAX_CHARTS = 32
"""Charts: ratings of environments beyond are left out."""
_READ_BYTES = 32 << 20
"""Bytes of the log that one call reads; the next call goes on there."""


class ChartLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart: points (step, value)."""

    name: str
    points: list[tuple[float, float]]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart by its name: reward, held_out, end_to_end_p99, staleness, difficulty, or ratings/ENV."""

    name: str
    lines: list[ChartLine]


def chart_values(figures: Mapping[str, float]) -> Iterator[tuple[str, str, float, float]]:
    """Yield chart, line, step and value of what the figures of one step hold. Pure."""
    step = figures.get("train/step")
    if step is None:
        return
    for name, value in figures.items():
        match name.split("/", 3):
            case ["reward", env, "rater", rater]:
                yield f"ratings/{env}", rater, step, value
            case ["reward", "mean"]:
                yield "reward", "all", step, value
            case ["reward", env, "mean"]:
                yield "reward", env, step, value
            case ["eval", env, measure] if measure.startswith("avg@"):
                yield "held_out", env, figures.get(f"eval/{env}/step", step), value
            case ["latency", "e2e", "p99"]:
                yield "end_to_end_p99", "all", step, value
            case ["staleness", "mean" | "max" as which]:
                yield "staleness", which, step, value
            case ["curriculum", env, "drawn_difficulty"]:
                yield "difficulty", env, step, value


class _Curve:
    """The points of one line; `stride` steps are merged into each but the last."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float, int]] = []
        self._stride = 1

    def add(self, step: float, value: float) -> None:
        while self._points and self._points[-1][0] >= step:
            self._points.pop()
        if self._points and self._points[-1][2] < self._stride:
            _, mean, count = self._points.pop()
            value, count = (mean * count + value) / (count + 1), count + 1
        else:
            count = 1
        self._points.append((step, value, count))
        if len(self._points) > MAX_POINTS:
            self._stride *= 2
            pairs = zip(self._points[::2], [*self._points[1::2], None], strict=False)
            self._points = [one if two is None else _merged(one, two) for one, two in pairs]

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(step, value) for step, value, _ in self._points]


def _merged(one: tuple[float, float, int], two: tuple[float, float, int]) -> tuple[float, float, int]:
    count = one[2] + two[2]
    return two[0], (one[1] * one[2] + two[1] * two[2]) / count, count


class CurveReader:
    """Reads the curves of the run whose folder is `folder`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS_FILE
        self._offset = 0
        self._curves: dict[str, dict[str, _Curve]] = {}

    def read(self) -> list[Chart]:
        """Return the charts, with what was appended to the log since the last call."""
        for row in self._new_rows():
            try:
                figures = from_json(METRICS_FILE, dict[str, float], row)
            except SchemaError:
                continue  # a crash of the machine can tear a line
            for chart, line, step, value in chart_values(figures):
                if chart not in self._curves and len(self._curves) >= _MAX_CHARTS:
                    continue
                lines = self._curves.setdefault(chart, {})
                if line in lines or len(lines) < _MAX_LINES:
                    lines.setdefault(line, _Curve()).add(step, value)
        return [
            Chart(name=chart, lines=[ChartLine(name=name, points=curve.points) for name, curve in _distinct(lines)])
            for chart, lines in self._curves.items()
        ]

    def _new_rows(self) -> list[bytes]:
        """Return the whole lines that follow those already read."""
        try:
            with open_regular_file(self._path) as file:
                if file.seek(0, 2) < self._offset:  # another log
                    self._offset, self._curves = 0, {}
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole if whole or len(data) < _READ_BYTES else len(data)
        return data[:whole].split(b"\n")[:-1]


def _distinct(lines: Mapping[str, _Curve]) -> list[tuple[str, _Curve]]:
    """Return the lines of a chart, without the mean of all environments where there is one alone."""
    found = list(lines.items())
    return [pair for pair in found if pair[0] != "all"] if len(found) == 2 and "all" in lines else found
