"""Reads from a nats-server's own store how much its streams have reserved, before the server starts.

A stream keeps its reservation until it is made smaller, which takes a server that runs; and a server that allows less
than is reserved neither starts all streams nor makes any smaller.
"""

import json
from contextlib import suppress
from pathlib import Path

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.common.small_files import read_small_file

__all__ = ["reserved_in_store", "store_budget"]


def reserved_in_store(store: Path) -> int:
    """Return the bytes that the streams of the server in `store` reserve, 0 where there are none."""
    found = 0
    for file in (store / "jetstream").glob("jetstream/*/streams/*/meta.inf"):
        with suppress(OSError, ValueError):  # the server says what is wrong with it
            described = json.loads(read_small_file(file))
            size = described.get("max_bytes") if isinstance(described, dict) else None
            found += size if isinstance(size, int) and size > 0 else 0
    return found


def store_budget(store: Path, config: StreamsConfig) -> int:
    """Return what the streams of a store may take, bytes: as configured, or what those that exist keep."""
    return max(config.total_bytes(), reserved_in_store(store))
