"""JetStream alone: `python -m speed.raw publish|consume URL TOKEN_FILE GROUPS BYTES`, by the client library as it is.

Publishing is `js.publish` from 64 tasks; consuming, fetches of 64 messages with acknowledgements. Each prints as JSON
when it began and ended (Unix seconds) and the CPU seconds that it took, without those of its start.
"""

import json
import sys
import time

import anyio
import nats
from nats.errors import TimeoutError as NatsTimeoutError

__all__ = ["STREAM", "SUBJECT"]

STREAM, SUBJECT = "RAW", "raw.groups"


async def publish(url: str, token: str, groups: int, size: int) -> None:
    client = await nats.connect(url, token=token)
    stream, data, numbers = client.jetstream(), bytes(size), iter(range(groups))

    async def worker() -> None:
        for number in numbers:
            await stream.publish(SUBJECT, data, headers={"Nats-Msg-Id": str(number)})

    async with anyio.create_task_group() as tasks:
        for _ in range(64):
            tasks.start_soon(worker)
    await client.close()


async def consume(url: str, token: str, groups: int) -> None:
    client = await nats.connect(url, token=token)
    pull = await client.jetstream().pull_subscribe(SUBJECT, durable="raw", stream=STREAM)
    while groups:
        try:
            messages = await pull.fetch(min(64, groups), timeout=5)
        except NatsTimeoutError:
            continue
        for message in messages:
            await message.ack()
        groups -= len(messages)
    await client.close()


async def main(end: str, url: str, token_file: str, groups: str, size: str) -> None:
    token = await anyio.Path(token_file).read_text()
    began_s, before_s = time.time(), time.process_time()
    await (publish(url, token, int(groups), int(size)) if end == "publish" else consume(url, token, int(groups)))
    print(json.dumps([began_s, time.time(), time.process_time() - before_s]))


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
