"""Passes the bytes of each connection on to a server, and its answers back: the least that a process in between costs.

python tests/benchmarks/forwarder.py 8001 127.0.0.1 8000
"""

import asyncio
import sys
from contextlib import suppress


async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy bytes until one side ends."""
    with suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.close()


async def forward(port: int, host: str, server_port: int) -> None:
    """Forward connections to `port` of loopback until cancelled."""

    async def serve(source: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection(host, server_port)
        await asyncio.gather(copy(source, writer), copy(reader, answer))

    async with await asyncio.start_server(serve, "127.0.0.1", port, backlog=1024) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(forward(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
