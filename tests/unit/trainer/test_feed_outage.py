"""An outage of the broker while a batch is fetched is waited out: it neither ends the trainer nor voids the batch."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import pytest

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.trainer import feed as module
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry
from lachesis.testing import MemoryBus


class Flaky(MemoryBus):
    """Fails the first fetches."""

    failures = 3

    async def fetch(
        self, stream: str, seqs: Sequence[int], subject: str | None = None
    ) -> AsyncGenerator[StoredMessage]:
        if self.failures:
            self.failures -= 1
            raise InfrastructureError("the broker is away")
        async for message in super().fetch(stream, seqs, subject):
            yield message


async def test_an_outage_while_fetching_is_waited_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = GroupRef(group="0" * 32, seq=1, env="e", sequences=1, tokens=1, policy_step=0, advantages=[1.0])
    entry = LedgerEntry(
        run="r", trainer="main", index=0, previous="0" * 64, watermark=0, resolved=b"", events_cursor=0,
        batch=Batch(number=0, groups=[gone], sequences=1, tokens=1), next_batch=1,
    )  # fmt: skip

    async def ledger(*_: object, **__: object) -> AsyncIterator[LedgerEntry]:
        yield entry

    monkeypatch.setattr(module, "follow_ledger", ledger)
    async with Flaky() as bus:
        feed = await BatchFeed.open(bus, "r", "main", term="t")
        feed.position = LedgerPosition()
        fed = [batch async for batch in feed.batches()]
        assert bus.failures == 0
    assert [list(batch.unfetched) for batch in fed] == [[gone.seq]]
    (waited,) = caplog.messages
    assert waited.startswith("trying again: fetch batch 0: the broker is away (tried since ")
