"""The schedule of a campaign: which process is struck how and when, decided by a seed before anything runs. Pure.

Targets are dealt like cards: a deck holds each as often as its weight says, is shuffled, dealt to its end and shuffled
again, so that every kind of process is struck about as often as every other of its weight, at random moments.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["CONNECTION", "SERVER", "SUPERVISOR", "Action", "Strike", "schedule"]

Action = Literal["kill", "freeze", "restart", "duplicate", "cut", "silence"]
"""kill: SIGKILL. freeze: SIGSTOP, later SIGCONT. restart: SIGTERM, and its supervisor starts it again. duplicate: a
second instance beside it. cut: every connection to the server closed. silence: connections pass nothing on for a while,
or no answers only, and are then cut or go on."""

SUPERVISOR = "supervisor"
SERVER = "nats-server"
CONNECTION = "connection"

_WEIGHTS = {"supervisor": 1.0, "trainer": 1.0, "inference": 1.0}
"""What takes seconds to come back is struck less often; everything else has `_USUAL`."""
_USUAL = 3.0
_SHARES: Mapping[Action, float] = {"kill": 70, "freeze": 12, "restart": 8, "duplicate": 5, "cut": 3, "silence": 2}
_AT_ONCE = (1, 1, 1, 1, 1, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Strike:
    """`after_s`: seconds after the strike before it. `seconds`: how long it lasts (freeze, duplicate, silence).

    `choice`, in [0, 1), decides whatever else there is to decide.
    """

    after_s: float
    action: Action
    target: str
    seconds: float
    choice: float


def schedule(seed: int, targets: list[str], *, kills: int, pause_s: float, connections: bool) -> list[Strike]:
    """Return strikes with `kills` kills among them, on `targets` and, with `connections`, on the connections.

    `pause_s`: mean seconds between two moments; at some of them several are struck at once.
    """
    rng = random.Random(seed)
    cards = _deal(rng, targets)
    actions = [action for action in _SHARES if connections or action not in {"cut", "silence"}]
    strikes: list[Strike] = []
    left = kills
    while left:
        for i in range(rng.choice(_AT_ONCE)):
            action = rng.choices(actions, [_SHARES[action] for action in actions])[0]
            target = CONNECTION if action in {"cut", "silence"} else next(cards)
            after_s = rng.expovariate(1 / pause_s) if i == 0 else 0.0
            strikes.append(Strike(after_s, action, target, rng.uniform(0.1, 2.0), rng.random()))
            left -= action == "kill"
            if not left:
                break
    return strikes


def _deal(rng: random.Random, targets: list[str]) -> Iterator[str]:
    owed = dict.fromkeys(sorted(targets), 0.0)
    while True:
        deck = []
        for target in owed:
            owed[target] += _WEIGHTS.get(target.partition("-")[0], _USUAL)
            deck += [target] * int(owed[target])
            owed[target] -= int(owed[target])
        rng.shuffle(deck)
        yield from deck
