"""A trainer that sends weights through the run's server, and what looks at how they arrive."""

import torch

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.model.tensors import policy_version, rounded, weights_digest
from lachesis.pipeline.model.weight_files import read_weights
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.pipeline.weights.upload import WeightsUploader
from lachesis.schemas import subjects
from lachesis.schemas.control import PolicyRecord

RUN = "run"
MIB = 1 << 20


class Trainer:
    """A model that moves by small steps, and what it has sent. Its weights take 2 MiB, three chunks when coded."""

    def __init__(self, bus, *, budget=48 * MIB, kept=8, lineage="a", **settings):
        self.config = WeightsConfig(transport="nats", **settings)
        self.uploader = WeightsUploader(bus, RUN, self.config, budget=budget, kept=kept)
        self.lineage = lineage
        torch.manual_seed(0)
        self.tensors = {"w": torch.randn(512, 1024), "b": torch.randn(64), "n": torch.arange(3)}
        self.sent = []

    async def step(self, size=1e-5):
        """Take a step, send the weights and return their record and the tensors that were sent."""
        self.tensors = {
            name: t + size * torch.sign(torch.randn(t.shape)) if t.is_floating_point() else t
            for name, t in self.tensors.items()
        }
        tensors = rounded(self.tensors, self.config.dtype)
        version = policy_version(len(self.sent), self.lineage, tensors)
        sent = await self.uploader.send(version, tensors)
        self.sent.append(sent)
        await self.uploader.expire()
        record = PolicyRecord(run=RUN, version=str(version), weights=sent.location, tokenizer_hash="t", written_ns=1)
        return record, self.tensors


class CountingBus:
    """A bus that counts the chunks it hands out, and fails before number `fails_at`."""

    def __init__(self, bus, fails_at=None):
        self._bus = bus
        self.fails_at = fails_at
        self.chunks = 0

    def __getattr__(self, name):
        return getattr(self._bus, name)

    async def fetch(self, stream, seqs, subject=None):
        async for message in self._bus.fetch(stream, seqs, subject):
            if self.chunks == self.fails_at:
                self.fails_at = None
                raise InfrastructureError("the connection is lost")
            self.chunks += 1
            yield message


async def check(receiver, record, tensors):
    """Fetch a record's weights and compare them with what the trainer had."""
    path = await receiver.path_of(record)
    found = read_weights(path, record.policy_version, tensors)
    dtype = "bfloat16" if weights_digest(found) != weights_digest(tensors) else "float32"
    expected = rounded(tensors, dtype)
    assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in tensors)
    return dtype


class CutBus:
    """A bus of which one commit of a chunk calls `then`, after so many chunks."""

    def __init__(self, bus, chunks, then=None):
        self._bus = bus
        self._left = chunks
        self._then = then

    def __getattr__(self, name):
        return getattr(self._bus, name)

    async def commit(self, subject, data, **arguments):
        if subject == subjects.weights_chunks(RUN):
            self._left -= 1
            if self._left == -1:
                if self._then is None:
                    raise InfrastructureError("the server is away")
                await self._then()
        return await self._bus.commit(subject, data, **arguments)
