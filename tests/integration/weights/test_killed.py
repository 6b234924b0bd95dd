"""Weights on the move while a process is killed: the trainer, the inference server, and the broker. A real server."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import msgspec
import pytest
from contract.weights import RUN, CountingBus, CutBus, Trainer, check

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.weights.download import WeightsReceiver
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.subjects import WEIGHTS
from lachesis.schemas.weights import WeightsHead, head_seq

CHILD = Path(__file__).with_name("child.py")


@pytest.fixture
async def bus(fresh_server, streams_config):
    async with await connect(fresh_server.url, run=RUN, name="tests", token=fresh_server.token) as connected:
        await connected.ensure_streams(streams_config)
        yield connected


async def killed(server, what, folder, record=b""):
    """Run a child until it kills itself; return what it has written."""
    tests = Path(__file__).parents[2]
    command = [sys.executable, str(CHILD), what, server.url, server.token, str(folder), record.decode()]
    environ = {**os.environ, "PYTHONPATH": str(tests)}
    done = await anyio.run_process(command, env=environ, check=False, stderr=subprocess.STDOUT)
    assert done.returncode == -signal.SIGKILL, done.stdout.decode()
    return done.stdout


@pytest.mark.slow
async def test_a_trainer_killed_in_the_middle_of_an_upload_leaves_the_version_before(fresh_server, bus, tmp_path):
    record = msgspec.json.decode(await killed(fresh_server, "upload", tmp_path), type=PolicyRecord)
    head = decode(WeightsHead, (await bus.last(WEIGHTS, subjects.weights_heads(RUN))).data)
    chunk = await bus.last(WEIGHTS, subjects.weights_chunks(RUN))
    assert (head.version, head_seq(record.weights) < chunk.seq) == (record.version, True), "chunks without a head"
    receiver = WeightsReceiver(bus, RUN, tmp_path / "server")
    assert record.version in await receiver.path_of(record)
    again = Trainer(bus, lineage="b")
    for _ in range(2):
        await check(receiver, *await again.step())


@pytest.mark.slow
async def test_a_server_killed_in_the_middle_of_a_download_goes_on_where_it_was(fresh_server, bus, tmp_path):
    record, tensors = await Trainer(bus).step()
    await killed(fresh_server, "download", tmp_path / "server", msgspec.json.encode(record))
    assert not list((tmp_path / "server").glob("*.safetensors"))
    counting = CountingBus(bus)
    await check(WeightsReceiver(counting, RUN, tmp_path / "server"), record, tensors)
    head = decode(WeightsHead, (await bus.get(WEIGHTS, head_seq(record.weights))).data)
    assert counting.chunks == len(head.chunks) - 1


async def test_a_broker_killed_in_the_middle_of_an_upload(fresh_server, bus, tmp_path):
    async def restart():
        os.kill(fresh_server.pid, signal.SIGKILL)
        await fresh_server.wait()
        await fresh_server.start()

    trainer, receiver = Trainer(CutBus(bus, chunks=3, then=restart)), WeightsReceiver(bus, RUN, tmp_path / "server")
    for _ in range(3):
        record = await trainer.step(size=1.0)
        await check(receiver, *record)
    late = WeightsReceiver(bus, RUN, tmp_path / "late")
    await check(late, *record)


async def test_a_broker_killed_in_the_middle_of_a_download(fresh_server, bus, tmp_path):
    class Killing(CountingBus):
        async def fetch(self, stream, seqs, subject=None):
            async for message in self._bus.fetch(stream, seqs, subject):
                self.chunks += 1
                yield message
                if self.chunks == 1:
                    os.kill(fresh_server.pid, signal.SIGKILL)
                    await fresh_server.wait()
                    await fresh_server.start()

    record, tensors = await Trainer(bus).step()
    receiver = WeightsReceiver(Killing(bus), RUN, tmp_path / "server")
    path = None
    while path is None:
        try:
            path = await receiver.path_of(record)
        except InfrastructureError:  # as the service does
            continue
    await check(receiver, record, tensors)
