"""The retry policy: how long to pause between two attempts, and when to give up. Pure.

Everything in the package that tries again uses one of these, so that first pause, growth, longest pause and jitter
mean the same everywhere. `runtime.retries` has the loop for services; the bus asks for the pauses alone.
"""

import math
import random
from dataclasses import dataclass

__all__ = ["RetryPolicy"]

_MAX_GROWTHS = 64
"""Times that a pause grows: after as many it is astronomical, and one more may be too large for a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Pauses that begin with `first_s` seconds and grow by the factor `growth` up to `longest_s`.

    `jitter` is the share of a pause that is random: 0 for none, 1 for a pause between 0 and its full length. Callers
    that failed together then do not come back together. `attempts` and `give_up_s` (seconds since the first attempt
    began) bound the whole; None: no bound.
    """

    first_s: float
    longest_s: float = math.inf
    growth: float = 2.0
    jitter: float = 0.0
    attempts: int | None = None
    give_up_s: float | None = None

    def pause_s(self, failures: int) -> float:
        """Return how long to pause after `failures` attempts failed (at least 1), seconds."""
        full_s = min(self.longest_s, self.first_s * self.growth ** min(failures - 1, _MAX_GROWTHS))
        return full_s * (1.0 - self.jitter * random.random())

    def gives_up(self, failures: int, elapsed_s: float) -> bool:
        """Return whether to stop after `failures` failed attempts, `elapsed_s` seconds after the first began."""
        return (self.attempts is not None and failures >= self.attempts) or (
            self.give_up_s is not None and elapsed_s >= self.give_up_s
        )
