"""Measures by a small loop, in about a second, how fast this machine is at the pipeline's work."""

import time

from lachesis.schemas.codec import decode, encode
from lachesis.schemas.rollout import RolloutGroup
from lachesis.services.run.load_messages import GroupShape, make_group

__all__ = ["measure_loop"]

_ROUNDS, _GROUPS = 20, 20
_SHAPE = GroupShape(samples=8, tokens=1024)


def measure_loop() -> float:
    """Return the processor time of encoding and decoding a group of 8x1024 tokens, milliseconds.

    It is the least of several rounds, so that other processes of the machine change it little.
    """
    group, least_s = make_group(_SHAPE), float("inf")
    for _ in range(_ROUNDS):
        start_s = time.process_time()
        for _ in range(_GROUPS):
            decode(RolloutGroup, encode(group))
        least_s = min(least_s, time.process_time() - start_s)
    return 1e3 * least_s / _GROUPS
