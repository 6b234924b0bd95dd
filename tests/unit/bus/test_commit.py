"""Who is believed when a commit is refused: a leader that was cut off knows of less than the others stored."""

import anyio
import pytest

from lachesis.pipeline.bus import leader
from lachesis.pipeline.bus.api import PubAck, StoredMessage
from lachesis.pipeline.bus.publisher import Publisher
from lachesis.pipeline.bus.server_waits import ServerWaits
from lachesis.pipeline.errors import FencedError, HistoryLostError

HEADERS = {"Nats-Msg-Id": "ours"}
EVENTS, KEYS = "lachesis_r_EVENTS", "KV_lachesis_r_KEYS"


class Link:
    """The parts of a connection that a commit asks of it itself."""

    class config:  # noqa: N801
        inbox_prefix = "_INBOX"
        window_bytes, window_messages = 1 << 20, 8

    run = "r"

    def __init__(self) -> None:
        self.waits = ServerWaits(anyio.current_time)


class Scripted(Publisher):
    """Has the commit refused, and says what lies last on the subject, as the answers have it in turn."""

    def __init__(self, *answers: tuple[PubAck | None, int, str]) -> None:
        super().__init__(Link())  # type: ignore[arg-type]
        self.answers = list(answers)
        self.sent = 0
        self.reasons: list[str] = []

    async def store(self, subject, data, headers):
        assert headers["Nats-Expected-Last-Subject-Sequence"] == "5"
        self.sent += 1
        self.reasons.append(", ".join(wait.reason for wait in self._link.waits._waits))
        ack = self._answer()[0]
        if ack is None:
            raise FencedError("wrong last sequence")
        return ack

    async def last(self, stream, subject, *, patient=False):
        _, seq, msg_id = self._answer()
        if len(self.answers) > 1:
            self.answers.pop(0)
        return StoredMessage("EVENTS", subject, seq, b"", 0, {"Nats-Msg-Id": msg_id}) if seq else None

    def _answer(self):
        return self.answers[0]

    async def try_commit(self, stream=EVENTS):
        return await self.commit(stream, "rl.x", b"data", expected=5, headers=HEADERS)


def ack(seq, *, duplicate=False):
    return PubAck("EVENTS", seq, duplicate)


async def test_a_leader_that_was_cut_off_is_not_believed():
    """It refuses, and then says, from what it has, that less was stored; the next leader stores it."""
    publisher = Scripted((None, 3, "old"), (None, 5, "before"), (ack(6), 0, ""))
    assert await publisher.try_commit() == 6
    assert publisher.sent == 3
    assert publisher.reasons[0] == "", "the first attempt has the reason of its publication alone"
    assert "up to sequence 3, and 5 was stored" in publisher.reasons[1]


async def test_what_it_had_stored_is_found_once_the_next_one_leads():
    assert await Scripted((ack(6, duplicate=True), 5, "before"), (ack(6, duplicate=True), 6, "ours")).try_commit() == 6
    assert await Scripted((None, 0, ""), (None, 6, "ours")).try_commit() == 6


async def test_another_writer_is_believed_at_once():
    publisher = Scripted((None, 7, "another"))
    with pytest.raises(FencedError, match="last sequence is 7, not 5"):
        await publisher.try_commit()
    assert publisher.sent == 1


async def test_a_deleted_key_is_believed_at_once():
    publisher = Scripted((None, 0, ""))
    with pytest.raises(FencedError, match="it was deleted"):
        await publisher.try_commit(KEYS)
    assert publisher.sent == 1


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        ((None, 3, "old"), HistoryLostError, "last sequence is 3, but 5 was stored"),
        ((None, 0, ""), FencedError, "nothing is left there"),
        ((None, 5, "before"), FencedError, "last sequence is 5, not 5"),
        ((ack(2, duplicate=True), 5, "before"), FencedError, "used up the id of this commit"),
    ],
)
async def test_what_is_said_for_long_is_believed(monkeypatch, answer, error, text):
    monkeypatch.setattr(leader, "BELIEVE_LOSS_S", 0.05)
    publisher = Scripted(answer)
    with pytest.raises(error, match=text):
        await publisher.try_commit()
    assert publisher.sent > 1
