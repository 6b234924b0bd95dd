"""Why a server leaves something unanswered: its answers put into words, without a server."""

from types import SimpleNamespace
from typing import cast

import anyio
import msgspec
import pytest
from nats.aio.msg import Msg

from lachesis.pipeline.bus import diagnosis
from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.diagnosis import explain
from lachesis.pipeline.bus.replies import NO_LEADER, STREAM_NOT_FOUND
from lachesis.pipeline.bus.server_link import ServerLink
from lachesis.schemas import subjects

STREAM_INFO = f"$JS.API.STREAM.INFO.{subjects.LEDGER}"
SERVER_INFO = "$JS.API.INFO"


class OneServer:
    """A connection to a server that gives `answers`. It leaves a question without one unanswered."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        self.config = ConnectionConfig(url="nats://127.0.0.1:4222")
        self.explanations: dict[str, tuple[float, str]] = {}
        self.optional: set[str] = set()
        self.refused: set[str] = set()
        self.is_up = True
        self.server_name = "one"
        self.answers = answers

    async def request_once(self, subject: str, _data: bytes, *, timeout_s: float) -> Msg | None:
        if subject in self.answers:
            return cast("Msg", SimpleNamespace(data=self.answers[subject]))
        await anyio.sleep(timeout_s)
        return None


def refusal(code: int, text: str) -> bytes:
    return msgspec.json.encode({"error": {"code": 503, "err_code": code, "description": text}})


async def reason(answers: dict[str, bytes]) -> str:
    return await explain(cast("ServerLink", OneServer(answers)), subjects.LEDGER)


@pytest.mark.parametrize("said", [b"", refusal(NO_LEADER, "no leader")])
async def test_a_server_without_a_leader_is_named_without_waiting_for_its_stream(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "DIAGNOSIS_S", 3600.0)  # how long the stream's silence would be waited for
    assert "JetStream at one has no leader" in await reason({SERVER_INFO: said})


async def test_what_a_stream_says_goes_before_what_its_server_says() -> None:
    said = {STREAM_INFO: refusal(STREAM_NOT_FOUND, "not found"), SERVER_INFO: b""}
    assert "`lachesis init`" in await reason(said)


async def test_a_silent_server_and_a_silent_stream_are_told_apart() -> None:
    assert "one takes connections and does not answer" in await reason({})
    assert "but not for LEDGER" in await reason({SERVER_INFO: b"{}"})


@pytest.mark.outside
async def test_servers_that_take_no_connection_are_named_however_their_addresses_are_written() -> None:
    server = OneServer({SERVER_INFO: b""})
    server.config = ConnectionConfig(url="127.0.0.1:1, nats://user:p%40ss@127.0.0.1:2")
    assert "(2 of 2 servers away: 127.0.0.1:1, 127.0.0.1:2)" in await explain(cast("ServerLink", server), "LEDGER")
