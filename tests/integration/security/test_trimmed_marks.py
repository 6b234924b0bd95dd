"""Each key that stores marks of what it read may find out whether a message that is gone was trimmed."""

import secrets

import pytest
from integration.security.secured import Secured

from lachesis.pipeline.access import OPERATOR, Scope
from lachesis.pipeline.errors import HistoryLostError
from lachesis.pipeline.extension import access_of
from lachesis.pipeline.runtime import stream_marks
from lachesis.pipeline.runtime.stream_marks import check_marks
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import StreamMark
from lachesis.schemas.codec import encode
from lachesis.schemas.retention import Retention
from lachesis.schemas.subjects import EVENTS

ACCESS = access_of(Scope(run="one", revision="live", trainer="main", environments=("words",)))
SUBJECT = subjects.event("score", "one", "live", "words")


@pytest.fixture(scope="module")
async def trimmed(secured: Secured) -> int:
    """Return the sequence of a message that was trimmed on the record."""
    async with await secured.bus(OPERATOR) as operator:
        seq, last = [(await operator.publish(SUBJECT, b"x", msg_id=secrets.token_hex(8))).seq for _ in range(2)]
        await operator.put(keys.RETENTION, encode(Retention(run="one", trimmed={EVENTS: last})))
        await operator.trim(EVENTS, [SUBJECT], before=last)
        return seq


@pytest.mark.parametrize("identity", ["batcher", "normalizer", "curriculum", "health"])
async def test_a_trimmed_message_is_known_to_be_trimmed_by_every_key_that_marks(
    secured: Secured, trimmed: int, identity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_marks, "BELIEVE_LOSS_S", 0.0)
    async with await secured.bus(identity) as bus:
        await check_marks(bus, "one", {EVENTS: StreamMark(trimmed, 1)}, writer=identity)
        for stream in ACCESS[identity].reads:
            with pytest.raises(HistoryLostError, match="it ends at sequence"):
                await check_marks(bus, "one", {stream: StreamMark(1 << 19, 1)}, writer=identity)
