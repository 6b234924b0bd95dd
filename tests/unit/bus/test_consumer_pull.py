"""A pull that waits asks rarely, at moments that it shares with other processes, and within the server's rules."""

import time
from types import SimpleNamespace
from typing import Any

from lachesis.pipeline.bus.consumer_pull import ConsumerPull

NS = 1_000_000_000


async def ensure() -> str:
    return "reader"


def test_a_request_ends_at_a_full_second_of_the_machines_clock():
    link: Any = SimpleNamespace(nc=SimpleNamespace(new_inbox=lambda: "inbox"))
    pull = ConsumerPull(link, "s", ensure=ensure, accept=lambda msg: True, max_messages=8, max_bytes=None)
    before_s = time.monotonic()
    request = pull._next_request()
    after_s = time.monotonic()
    assert request is not None
    ends = (before_s + request["expires"] / NS, after_s + request["expires"] / NS)
    assert any(ends[0] - 1e-6 <= second <= ends[1] + 1e-6 for second in range(int(ends[0]), int(ends[1]) + 2))
    assert 2 * request["idle_heartbeat"] <= request["expires"], "the server refuses it otherwise"
