"""Decides which calls of a rater to skip, and which failures to believe. Pure; times are seconds.

A circuit breaker spares a rater that is down, and the groups that would wait for it. Hung calls are calls that were
given up and still run. Suspects are arguments that fail again and again while others are answered: then the rater is
available, but cannot take these arguments.
"""

from collections import OrderedDict
from typing import NamedTuple

__all__ = ["MAX_LONE_FAILURES", "CircuitBreaker", "HungCalls", "SuspectArguments"]

MAX_LONE_FAILURES = 20
"""Failures of one argument, others being answered between each two of them, after which it counts as its own fault."""
_MAX_REMEMBERED_ARGUMENTS = 1024
_FIRST_TRIAL_S = 5.0
_LAST_TRIAL_S = 300.0


class CircuitBreaker:
    """Opens after `failures` calls in a row that infrastructure failed, for `pause_s`; then lets one call try."""

    def __init__(self, failures: int, pause_s: float) -> None:
        self._failures = failures
        self._pause_s = pause_s
        self._in_a_row = 0
        self._until_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls may have to be refused; `admits` says which."""
        return self._in_a_row >= self._failures

    def admits(self, now_s: float) -> bool:
        """Return whether a call may be made now.

        After a pause the first asker may; the others wait for its outcome.
        """
        if not self.is_open:
            return True
        if now_s < self._until_s:
            return False
        self._until_s = now_s + self._pause_s
        return True

    def succeeded(self) -> None:
        """Say that a call was answered, with a rating or without: the rater is there."""
        self._in_a_row = 0

    def failed(self, now_s: float) -> None:
        """Say that infrastructure failed a call for good."""
        self._in_a_row += 1
        if self._in_a_row >= self._failures:
            self._until_s = now_s + self._pause_s


class HungCalls:
    """Calls that were given up and still run. `most` of them block further calls until a trial call is answered; then
    the calls before the trial are forgotten, since some of them may never end.

    Trials come after 5 s, then after twice as long each time, up to 5 minutes. So calls that hang for good cost few
    threads, and a rater is called again within about the time for which it hung.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: set[object] = set()
        self._trial_s = 0.0
        self._pause_s = _FIRST_TRIAL_S

    def __len__(self) -> int:
        return len(self._running)

    def admits(self, now_s: float) -> bool:
        """Return whether a further call may be made now."""
        if len(self._running) < self._most:
            return True
        if now_s < self._trial_s:
            return False
        self._pause_s = min(2 * self._pause_s, _LAST_TRIAL_S)
        self._trial_s = now_s + self._pause_s
        return True

    def gave_up(self, call: object, now_s: float) -> None:
        """Say that a call was given up and still runs."""
        self._running.add(call)
        if len(self._running) == self._most:
            self._trial_s = now_s + self._pause_s

    def ended(self, call: object) -> None:
        """Say that a call that was given up has ended after all."""
        self._running.discard(call)

    def answered(self) -> None:
        """Say that a call was answered in time."""
        if len(self._running) >= self._most:
            self._running.clear()
        self._pause_s = _FIRST_TRIAL_S


class _Failures(NamedTuple):
    times: int
    answered_before: int
    failed_before: int


class SuspectArguments:
    """Counts, for arguments that failed as if the rater were away, how often that was while it answered others.

    A failure counts when, since the argument's last one, more calls were answered than failed: so none counts in an
    outage, nor while a rater is so busy that it refuses most calls.
    """

    def __init__(self) -> None:
        self._answered = self._failed = 0
        self._known: OrderedDict[int, _Failures] = OrderedDict()

    def answered(self, key: int) -> None:
        """Say that a call with this argument was answered."""
        self._answered += 1
        self._known.pop(key, None)

    def others_answered(self, calls: int) -> None:
        """Say that so many calls were answered whose arguments never failed."""
        self._answered += calls

    def failed(self, key: int) -> bool:
        """Record that a call with this argument failed; return whether the argument is at fault."""
        self._failed += 1
        last = self._known.pop(key, None)
        times = 0
        if last is not None:
            others = self._failed - last.failed_before - 1
            times = last.times + (self._answered - last.answered_before > others)
        self._known[key] = _Failures(times, self._answered, self._failed)
        if len(self._known) > _MAX_REMEMBERED_ARGUMENTS:
            self._known.popitem(last=False)
        return times >= MAX_LONE_FAILURES
