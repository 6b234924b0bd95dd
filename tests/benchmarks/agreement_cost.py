"""What Krippendorff's alpha costs a unit while it streams: microseconds of processor time, the best of several passes.

.venv/bin/python tests/benchmarks/agreement_cost.py
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from lachesis.pipeline.scorer.logic.intervals import StreamingCI
from lachesis.pipeline.scorer.logic.krippendorff import IntervalAlpha, RaterReliability

UNITS = 20_000
PASSES = 9


def cost(make: Callable[[], Callable[[Any], None]], units: Sequence[Any]) -> float:
    """Return microseconds a unit."""
    best = float("inf")
    for _ in range(PASSES):
        add = make()
        start = time.process_time()
        for unit in units:
            add(unit)
        best = min(best, time.process_time() - start)
    return 1e6 * best / len(units)


def main() -> None:
    rng = random.Random(0)
    for raters in (2, 4, 8):
        units = [[rng.random() for _ in range(raters)] for _ in range(UNITS)]
        names = [f"rater {i}" for i in range(raters)]
        named = [dict(zip(names, unit, strict=True)) for unit in units]
        alpha = cost(lambda: IntervalAlpha().add_unit, units)
        without = cost(lambda names=names: RaterReliability(names).add_unit, named)  # type: ignore[misc]
        print(f"{raters} raters: alpha {alpha:.2f} us a unit, with each rater left out as well {without:.2f}")
    named_units = [(f"group {i // 8}", unit) for i, unit in enumerate(units)]

    def start() -> Callable[[Any], None]:
        made = StreamingCI()
        return lambda pair: made.add_unit(*pair)

    ci = cost(start, named_units)
    whole = StreamingCI()
    for name, unit in named_units:
        whole.add_unit(name, unit)
    start_s = time.process_time()
    whole.interval()
    read = 1e6 * (time.process_time() - start_s) / len(whole.groups)
    print(f"8 raters: interval {ci:.2f} us a unit, and {read:.1f} a group to read it")


if __name__ == "__main__":
    main()
