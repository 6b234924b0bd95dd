"""Streams whose copies have no place yet: servers that are joining are waited for, those that are not there are not.

What a server answers while others join is played: when a real cluster says so is up to its pace.
"""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lachesis.pipeline.bus import streams
from lachesis.pipeline.bus.server_link import ServerLink
from lachesis.schemas.errors import ConfigError

DEFINITION = {"name": "LEDGER", "num_replicas": 3, "max_bytes": 1}


class OneServer:
    """A connection to one of `servers`, which refuses a stream as often as `refusals` says."""

    def __init__(self, servers: int, refusals: int) -> None:
        self.nc = SimpleNamespace(servers=[None] * servers)
        self.left = refusals

    async def call_api(self, *_: Any, **__: Any) -> None:
        if self.left:
            self.left -= 1
            raise ConfigError("no suitable peers for placement (400/10005)")


async def test_servers_that_are_known_are_waited_for_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_JOIN_POLL_S", 0.0)
    server = OneServer(servers=3, refusals=5)
    with caplog.at_level(logging.WARNING, "lachesis"):
        await streams._write(cast("ServerLink", server), "CREATE", DEFINITION)
    assert server.left == 0
    assert caplog.text.count("stream LEDGER has no place for 3 copies yet; waiting for servers") == 1


@pytest.mark.parametrize(("servers", "join_s"), [(2, 3600.0), (3, 0.0)])
async def test_what_is_not_there_or_does_not_come_is_refused(
    servers: int, join_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_JOIN_S", join_s)
    server = OneServer(servers=servers, refusals=10**6)
    with pytest.raises(ConfigError, match="stream LEDGER is to have 3 copies, but too few servers run"):
        await streams._write(cast("ServerLink", server), "CREATE", DEFINITION)
