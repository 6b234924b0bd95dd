"""Divides the remaining capacity fairly among environments. Pure.

Guarantees that an environment below its part is not overtaken: what it waits for is kept for it as soon as that much is
free, longest wait first; and that part of the capacity is open to it at once, which those above their part cannot take.
Parts are in proportion to the environments' weights in a batch, so that each can make what its batches need.
An environment that does not ask reserves nothing, so a silent one blocks nobody.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lachesis.pipeline.admission.config import FlowConfig

__all__ = ["EnvFairness"]


@dataclass(slots=True)
class _WaitingEnv:
    sequences: int
    since_s: float


class EnvFairness:
    """What environments hold (leased, or stored without an outcome) and wait for, in sequences.

    `most_reserved` bounds what all parts together may keep from being used: a whole batch must always find room.
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

    def hold(self, env: str, sequences: int) -> None:
        self._held[env] += sequences

    def release(self, env: str, sequences: int) -> None:
        self._held[env] -= sequences

    def refusal_reason(self, env: str, sequences: int, free: int, now_s: float) -> str | None:
        """Return why `env` gets no `sequences` of the `free` ones, None if it does."""
        self._forget(now_s)
        self._asked_s[env] = now_s
        below = self._held[env] == 0 or self._held[env] + sequences <= self._part(env)
        left = free - self._kept_for_others(env, free, below=below)
        if sequences <= left:
            self._waiting.pop(env, None)
            return None
        if below:
            self._waiting.setdefault(env, _WaitingEnv(sequences, now_s)).sequences = sequences
        used = self._capacity - free
        if sequences > free:
            return f"{used} of {self._capacity} sequences are outstanding; some must be trained or dropped first"
        kept = free - left
        return (
            f"{used} of {self._capacity} sequences are outstanding, {kept:g} are kept for environments that have less"
        )

    def _part(self, env: str) -> float:
        """Return what is reserved for `env`, one of those that ask, in sequences."""
        return self._most_reserved * self._weight(env) / sum(map(self._weight, self._asked_s))

    def _weight(self, env: str) -> float:
        return self._weights.get(env, 1.0)

    def _kept_for_others(self, env: str, free: int, *, below: bool) -> float:
        kept = 0.0
        own = self._waiting.get(env)
        for other, wait in sorted(self._waiting.items(), key=lambda item: item[1].since_s):
            overtaken = other != env and not (below and own is not None and own.since_s <= wait.since_s)
            if overtaken and kept + wait.sequences <= free:
                kept += wait.sequences
        if not below:
            others = [other for other in self._asked_s if other != env and other not in self._waiting]
            kept += sum(max(0.0, self._part(other) - self._held[other]) for other in others)
        return kept

    def _forget(self, now_s: float) -> None:
        """Drop who has gone silent: its part after a lease period, its place in the queue after a few retries."""
        patience_s = 4 * self._config.retry_s + 1.0
        for env, asked_s in list(self._asked_s.items()):
            if now_s - asked_s > patience_s:
                self._waiting.pop(env, None)
            if now_s - asked_s > self._config.lease_s:
                del self._asked_s[env]
