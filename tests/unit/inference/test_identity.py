"""Another server than the run's is noticed on its first connection, named, and forgotten once it is right again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import numpy as np
import pytest

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.tokenizer_hash import plain_text, probe_of
from lachesis.pipeline.errors import UnreadableAnswerError, WrongServerError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.identity import IdentityGuard, ObservedServer
from lachesis.pipeline.model.tokenizer import build_character_tokenizer
from lachesis.schemas.control import PolicyRecord, TokenProbe

PROBE = TokenProbe(ids=[4, 5, 6], text="abc")
RECORD = PolicyRecord(
    run="r", version="2-l-c", weights="w", tokenizer_hash="right", written_ns=1, vocabulary=9,
    earlier=["0-l-a", "1-l-b"], token_probe=PROBE,
)  # fmt: skip
RIGHT = ObservedServer(model="policy", engine="lachesis", tokenizer_hash="right", text="a b c")


class Server:
    """Says `found` of itself."""

    where = "inference server http://fake"

    def __init__(self) -> None:
        self.found = RIGHT
        self.asked = 0

    async def observe(self, probe: TokenProbe | None, *, version: bool = False) -> ObservedServer:
        self.asked += 1
        await anyio.lowlevel.checkpoint()
        return self.found


@pytest.fixture
def said() -> list[str | None]:
    return []


@pytest.fixture
def guard(said: list[str | None]) -> IdentityGuard:
    found = IdentityGuard(said.append)
    found.expect(RECORD)
    return found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokenizer_hash": "wrong"}, "another tokenizer than the trainer: wrong, not right"),
        (
            {"tokenizer_hash": None, "text": "b c d"},
            "another vocabulary .* token ids as 'bcd', not 'abc'",
        ),
        ({"text": "b c d"}, "another vocabulary"),
        ({"model": "llama"}, "another model: 'llama', not 'policy'"),
        ({"engine": "ollama"}, "another engine: 'ollama', not 'lachesis'"),
        ({"weight_version": "2-l-zzz"}, "policy '2-l-zzz', which this run's trainer has not published"),
        ({"weight_version": "nonsense"}, "policy 'nonsense'"),
    ],
)
async def test_another_server_is_named_until_it_is_right_again(
    guard: IdentityGuard, said: list[str | None], monkeypatch: pytest.MonkeyPatch, change: dict[str, str], text: str
) -> None:
    monkeypatch.setattr("lachesis.pipeline.inference.identity._RECORD_S", 0.0)
    server = Server()
    await guard.check(server)
    server.found = msgspec.structs.replace(RIGHT, **change)
    with pytest.raises(WrongServerError, match=text):
        await guard.check(server, version=True)
    assert guard.problem is not None
    assert said == [guard.problem]
    server.found = msgspec.structs.replace(RIGHT, weight_version="1-l-b")
    await guard.check(server, version=True)
    assert said[-1] is guard.problem is None


async def test_the_hash_of_a_group_is_the_one_that_was_observed(guard: IdentityGuard) -> None:
    server = Server()
    await guard.check(server)
    assert guard.tokenizer_hash({}) == "right"
    assert guard.tokenizer_hash({"thinking": False}).startswith("right+")


async def test_one_comparison_serves_all_that_ask_for_one_before_it_begins(guard: IdentityGuard) -> None:
    server = Server()
    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(guard.check, server)
    assert server.asked <= 2


async def test_a_version_that_is_published_meanwhile_is_known(guard: IdentityGuard) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(guard.check_versions, Server(), ["3-l-d"])
        await anyio.wait_all_tasks_blocked()
        guard.expect(msgspec.structs.replace(RECORD, version="3-l-d"))
    assert guard.problem is None


async def test_a_trainer_that_does_not_say_what_it_published_is_believed() -> None:
    guard = IdentityGuard()
    guard.expect(msgspec.structs.replace(RECORD, earlier=None))
    await guard.check_versions(Server(), ["7-other-x"])


def test_the_probe_tells_a_rotated_vocabulary() -> None:
    tokenizer = build_character_tokenizer(max_length=64)
    probe = probe_of(tokenizer, None)
    assert probe is not None
    assert plain_text(tokenizer.decode(probe.ids)) == probe.text
    assert plain_text(tokenizer.decode([one + 1 for one in probe.ids])) != probe.text
    assert len(probe.ids) == len(set(probe.text)) > 20


@asynccontextmanager
async def serving(port: int, tokenizer: str, seen: list[str]) -> AsyncIterator[int]:
    """A server that keeps connections open and reports this hash; `seen` gets the paths."""
    answers = {
        "/v1/models": {"data": [{"id": "m", "max_model_len": 8, "tokenizer_hash": tokenizer, "owned_by": "x"}]},
        "/detokenize": {"prompt": "abc"},
        "/tokenize": {"count": 1, "max_model_len": 8, "tokens": [1]},
    }

    async def handle(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            try:
                while head := await stream.receive():
                    while b"\r\n\r\n" not in head or (
                        b"ontent-" in head.lower() and not head.rstrip(b"\r\n").endswith(b"}") and b"POST" in head[:5]
                    ):
                        head += await stream.receive()
                    path = head.split()[1].decode()
                    seen.append(path)
                    body = json.dumps(answers[path]).encode()
                    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
    async with listener, background() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 - not Django's


async def test_a_server_that_took_anothers_place_is_asked_for_nothing(guard: IdentityGuard) -> None:
    seen: list[str] = []
    async with serving(0, "right", []) as port, InferenceClient(
        ClientConfig(url=f"http://127.0.0.1:{port}", timeout=5.0)
    ) as client:  # fmt: skip
        client.guard = guard
        assert await client.tokenize([]) == [1]
        async with serving(0, "right", []):
            pass
    async with InferenceClient(ClientConfig(url=f"http://127.0.0.1:{port}", timeout=5.0)) as client:
        client.guard = guard
        async with serving(port, "wrong", seen):
            with pytest.raises(WrongServerError, match="another tokenizer"):
                await client.tokenize([])
        assert "/tokenize" not in seen
        async with serving(port, "right", seen):
            assert await client.tokenize([]) == [1]


@pytest.mark.parametrize("ids", [[9], [2**31 - 1]])
async def test_ids_that_the_trainer_does_not_know_are_no_answer(guard: IdentityGuard, ids: list[int]) -> None:
    async with InferenceClient(ClientConfig(url="http://127.0.0.1:1")) as client:
        client.guard = guard
        client._check_ids("/tokenize", [8])
        with pytest.raises(UnreadableAnswerError, match="none of the 9"):
            client._check_ids("/tokenize", np.array(ids).tolist())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokenizer_hash": "another"}, "has another tokenizer than before: another, not right"),
        ({"model": "another"}, "serves another model: 'another', not 'policy'"),
        ({"engine": "ollama"}, "is another engine: 'ollama', not 'lachesis'"),
    ],
)
async def test_a_server_of_another_role_stays_as_the_first_was(
    change: dict[str, str], text: str, said: list[str | None]
) -> None:
    guard, server = IdentityGuard(said.append), Server()
    await guard.check(server)
    assert server.asked == 0, "nothing is expected of it yet"
    guard.hold_to("policy", "right")
    await guard.check(server)
    server.found = msgspec.structs.replace(RIGHT, **change)
    with pytest.raises(WrongServerError, match=text):
        await guard.check(server)
    assert said[-1] is not None
    assert said[-1].endswith("start it again with the model and tokenizer that it had")
    server.found = RIGHT
    await guard.check(server)
    assert said[-1] is None
