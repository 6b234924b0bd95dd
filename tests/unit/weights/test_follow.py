"""Following the policy: what cannot be read or loaded is passed over, and the next record counts."""

import anyio

from lachesis.pipeline.weights.follow import follow_policy
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import DataError


class Server:
    """An inference server that knows of one damaged file; its own directory as well."""

    def __init__(self):
        self.loaded = []

    async def current(self):
        return self

    async def update_weights(self, path, version):
        if path == "damaged":
            raise DataError("torn")
        self.loaded.append(version)


async def test_records_that_cannot_be_read_or_loaded_are_passed_over(lab):
    server, loaded = Server(), anyio.Event()
    async with lab.running(lambda service: follow_until_drained(service, server, loaded), "inference"):
        for weights in (None, "damaged", "whole"):
            record = PolicyRecord(run="r", version="1-a-b", weights=str(weights), tokenizer_hash="t", written_ns=1)
            await lab.bus.put(subjects.BUCKETS["policy"], "r", encode(record) if weights else b"\xc1")
            await lab.bus.changed(until=lab.bus.now() + 0.02)
        with anyio.fail_after(10):
            await loaded.wait()
    assert server.loaded == ["1-a-b"]


async def follow_until_drained(service, server, loaded):
    async with service.until_drained():
        await follow_policy(service, server, loaded)
