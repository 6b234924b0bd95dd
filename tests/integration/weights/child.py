"""A trainer or an inference server that is killed in the middle: `child.py upload|download URL TOKEN FOLDER RECORD`."""

import os
import signal
import sys
from pathlib import Path

import anyio
import msgspec
from contract.weights import RUN, CountingBus, CutBus, Trainer

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.weights.download import WeightsReceiver
from lachesis.schemas.control import PolicyRecord


def die():
    os.kill(os.getpid(), signal.SIGKILL)


async def upload(bus):
    async def then():
        die()

    trainer = Trainer(CutBus(bus, chunks=3, then=then))
    record, _ = await trainer.step()
    sys.stdout.buffer.write(msgspec.json.encode(record))
    sys.stdout.buffer.flush()
    while True:
        await trainer.step(size=1.0)


async def download(bus, folder, record):
    class Dying(CountingBus):
        async def fetch(self, stream, seqs, subject=None):
            async for message in self._bus.fetch(stream, seqs, subject):
                if self.chunks:
                    die()
                self.chunks += 1
                yield message

    await WeightsReceiver(Dying(bus), RUN, Path(folder)).path_of(msgspec.json.decode(record, type=PolicyRecord))


async def main(what, url, token, folder, record):
    async with await connect(url, run=RUN, name="child", token=token) as bus:
        await (upload(bus) if what == "upload" else download(bus, folder, record))


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
