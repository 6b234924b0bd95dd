"""A circuit breaker: spares a rater that is down, and everybody who would wait for it. Pure; times are seconds."""

__all__ = ["Breaker"]


class Breaker:
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
        """Return whether a call may be made now. After a pause the first asker may; the others wait for its outcome."""
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
