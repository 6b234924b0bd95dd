"""Divides the remaining capacity among environments by their weights in a batch. Pure.

Part of the capacity is split by weight: an environment that holds less than its part is served before all that hold
more than theirs, and the part is kept free for it. If environments of equal standing want more than there is, they are
granted sequences in proportion to their weights, to within one group. So each has at least its share of what is
generated, as long as it requests that much and its part is enough for the groups it has under way. An environment that
requests nothing reserves nothing, so a silent one blocks no other.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lachesis.pipeline.governor.config import FlowConfig

__all__ = ["EnvFairness"]


@dataclass(slots=True)
class _WaitingEnv:
    """An environment that was refused not long ago; `since_s`: its last grant, or its first refusal."""

    sequences: int
    since_s: float
    refused_s: float


class EnvFairness:
    """Sequences that environments hold (leased, or stored without an outcome) and wait for.

    `most_reserved` bounds how much all parts together may keep unused: a whole batch must always find room.
    `weights` are those of `batching.mix`; an environment not named there weighs 1.
    """

    def __init__(
        self, config: FlowConfig, capacity: int, most_reserved: int, weights: Mapping[str, float] | None = None
    ) -> None:
        self._weights = dict(weights or {})
        self._config = config
        self._capacity = capacity
        self._most_reserved = min(most_reserved, int(config.reserved_share * capacity))
        self._held: Counter[str] = Counter()
        self._asked_s: dict[str, float] = {}
        self._waiting: dict[str, _WaitingEnv] = {}
        self._granted: dict[str, float] = {}
        """Sequences granted to each, divided by its weight; `_turn` is this figure of the last one that was granted."""
        self._turn = 0.0
        self._wanted_s: dict[str, float] = {}
        """When each was last refused."""

    def hold(self, env: str, sequences: int) -> None:
        self._held[env] += sequences

    def release(self, env: str, sequences: int) -> None:
        self._held[env] -= sequences

    def refusal_reason(self, env: str, sequences: int, free: int, now_s: float) -> str | None:
        """Return why `env` gets no `sequences` of the `free` ones; None if it gets them."""
        self._forget(now_s)
        self._asked_s[env] = now_s
        claim = self._claim(env, sequences, free)
        if sequences <= claim:
            self.grant(env, sequences, now_s)
            return None
        self.keep_turn(env, sequences, now_s)
        used = self._capacity - free
        if sequences > free:
            return f"{used} of {self._capacity} sequences are outstanding; some must be trained or dropped first"
        return (
            f"{used} of {self._capacity} sequences are outstanding, {free - claim:g} are kept for environments that "
            "have less"
        )

    def grant(self, env: str, sequences: int, now_s: float) -> None:
        """Record that `env` was granted `sequences`."""
        start = self._start(env)
        self._turn = max(self._turn, start)
        self._granted[env] = start + sequences / self._weight(env)
        if env in self._waiting:
            self._waiting[env].since_s = now_s

    def is_contended(self, env: str, now_s: float) -> bool:
        """Return whether other environments than `env` request leases too."""
        self._forget(now_s)
        return any(other != env for other in (*self._asked_s, *self._waiting))

    def keep_turn(self, env: str, sequences: int, now_s: float) -> None:
        """Record that `env` was refused `sequences`."""
        waiting = self._waiting.get(env)
        if waiting is None:
            self._granted[env] = self._start(env)
            self._waiting[env] = _WaitingEnv(sequences, now_s, now_s)
        else:
            waiting.sequences, waiting.refused_s = sequences, now_s
        self._wanted_s[env] = now_s

    @property
    def _waits_s(self) -> float:
        """Seconds without a request after which a refused environment no longer counts as waiting: a few retries."""
        return 4 * self._config.retry_s + 1.0

    def _claim(self, env: str, sequences: int, free: float) -> float:
        """Return how much of `free` may go to `env` now, so that all that wait are granted in proportion.

        The environment that was granted least for its weight may take all of it, because rounding to groups would
        otherwise leave a rest unused. If there are several such environments, the one that has waited longest may.
        """
        below = self._is_below(env, sequences)
        if not below:
            others = (other for other in self._asked_s if other != env and not self._is_ahead(other, env))
            free -= sum(max(0.0, self._part(other) - self._held[other]) for other in others)
        rivals = {
            other: one.since_s
            for other, one in self._waiting.items()
            if other != env
            and one.sequences <= free
            and (self._is_below(other, one.sequences) == below or self._is_ahead(env, other))
        }
        own = self._waiting.get(env)
        turn = (self._start(env), own.since_s if own else math.inf)
        if all(turn <= (self._start(other), since_s) for other, since_s in rivals.items()):
            return free
        level = self._level([env, *rivals], free)
        return max(0.0, (level - self._start(env)) * self._weight(env))

    def _level(self, names: Iterable[str], free: float) -> float:
        """Return the level that `free` reaches if it is shared like water that fills a vessel of steps."""
        level, weights, pool = math.inf, 0.0, free
        for name in sorted(names, key=self._start):
            if self._start(name) >= level:
                break
            weights += self._weight(name)
            pool += self._start(name) * self._weight(name)
            level = pool / weights
        return level

    def _is_below(self, env: str, sequences: int) -> bool:
        return self._held[env] == 0 or self._held[env] + sequences <= self._part(env)

    def _is_ahead(self, env: str, other: str) -> bool:
        """Return whether `env` was granted more than `other`, by their weights, and by more than its part.

        Then it goes before none, and nothing is kept for it, however little it holds: an environment whose groups are
        trained at once holds next to nothing.
        """
        return (self._start(env) - self._start(other)) * self._weight(env) > self._part(env)

    def _part(self, env: str) -> float:
        """Return the sequences reserved for `env`, which is one of those that request leases."""
        return self._most_reserved * self._weight(env) / sum(map(self._weight, self._asked_s))

    def _start(self, env: str) -> float:
        """Return the standing of `env` among those that wait.

        Sequences that it did not request earlier are not made up for; sequences that it was refused in the last lease
        period are, up to the capacity.
        """
        lag = self._capacity / self._weight(env) if env in self._wanted_s else 0.0
        return max(self._granted.get(env, 0.0), self._turn - lag)

    def _weight(self, env: str) -> float:
        return self._weights.get(env, 1.0)

    def _forget(self, now_s: float) -> None:
        """Drop silent environments: the part after a lease period, the place among the waiting after a few retries."""
        for env, one in list(self._waiting.items()):
            if now_s - one.refused_s > self._waits_s:
                del self._waiting[env]
        self._wanted_s = {env: at_s for env, at_s in self._wanted_s.items() if now_s - at_s <= self._config.lease_s}
        for env, asked_s in list(self._asked_s.items()):
            if now_s - asked_s > self._config.lease_s:
                del self._asked_s[env]
                self._granted.pop(env, None)
