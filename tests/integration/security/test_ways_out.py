"""What a person runs to see or mend a run goes on, whatever one key has stored, and says what it passed over."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest
from fuzz.examples import EXAMPLES
from integration.security.secured import Secured, auth_init
from nats.aio.client import Client

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import DeadLetter
from lachesis.schemas.codec import SCHEMA_VERSION, encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.ledger import TrainReport

RUN = """
run = "one"
[environments.words]
kind = "spell_backward"
"""
JUNK = (b"", b"\xc1", b"x", b"{}", b"\x80", msgspec.msgpack.encode({"v": SCHEMA_VERSION + 1}))
REPORT = next(one for one in EXAMPLES if isinstance(one, TrainReport))
POLICY = next(one for one in EXAMPLES if isinstance(one, PolicyRecord))
LETTER = DeadLetter(
    leased=True, run="one", env="words", revision="live", stage="scorer", kind="data", stream="x", seq=1, group=None,
    reason="schema version 4 is newer", place="here", time_ns=1,
)  # fmt: skip
PLANTED: dict[str, tuple[list[str], list[bytes], list[list[str]]]] = {
    "scorer": (
        [f"rl.{kind}.one.live.{env}" for kind in ("score", "dead") for env in ("words", "a$b", "\u202e", "x" * 200)],
        [*JUNK],
        [["gc"], ["dead", "list"]],
    ),
    "inference": (
        [subjects.value_subject("one", keys.inference(role)) for role in keys.INFERENCE_ROLES],
        [b"http://[::1", b"http://h:99999", b"\xff\xfe", b"", b"ftp://h", b"http://h:99999/\xff"],
        [["doctor"]],
    ),
    "trainer": (
        [subjects.state("one", "trainer", "live", "main"), subjects.value_subject("one", keys.POLICY)],
        [*JUNK, encode(REPORT.replace(run="two")), encode(POLICY.replace(run="two"))[:-3]],
        [["status"]],
    ),
    "batcher": (["rl.ledger.one.main", "rl.promotion.one.live"], [*JUNK], [["status"]]),
    "teacher": (
        ["rl.dead.one.live.words"],
        [encode(LETTER.replace(stream=name)) for name in ("", "EVIL", "A B", "a.>", "\r\n", subjects.BUCKET)],
        [["doctor"], ["dead", "list"]],
    ),
    "governor": ([subjects.value_subject("one", keys.RETENTION)], [JUNK[1]], [["export", "words.jsonl"], ["status"]]),
}


@pytest.fixture
async def server(tmp_path: Path, streams_config: StreamsConfig) -> AsyncIterator[Secured]:
    auth_init(tmp_path, config=RUN)
    (tmp_path / "run.toml").write_text(RUN)
    async with Secured(tmp_path, "one", tls=False) as made:
        async with await made.bus(OPERATOR) as operator:
            await operator.ensure_streams(streams_config)
        yield made


async def plant(client: Client, places: list[str], data: list[bytes]) -> None:
    for place in places:
        for one in data:
            await client.publish(place, one)
    await client.flush(30)


@pytest.mark.slow
@pytest.mark.parametrize("identity", PLANTED)
async def test_what_one_key_stores_ends_no_command(server: Secured, tmp_path: Path, identity: str) -> None:
    places, data, commands = PLANTED[identity]
    async with server.client(identity) as client:
        await plant(client, places, data)
    for command in commands:
        done = await anyio.run_process(
            [sys.executable, "-m", "lachesis", *command, "--config", str(tmp_path / "run.toml"),
             f"--set=folder={tmp_path}", *server.arguments],
            check=False,
        )  # fmt: skip
        said = (done.stdout + done.stderr).decode()
        assert "Traceback" not in said, said
        assert done.returncode == 0 or command[0] in ("doctor", "export"), (command, said)
        if command[0] == "export":  # it would not know what was trimmed, and could hold nothing back
            assert said.count("lachesis: ") == 1
            assert "the key 'retention' of run one, which says what was trimmed" in said
            assert "cannot be read" in said
        if command == ["doctor"]:  # this run has no model
            assert "OK    clock" in said, "it went on to the end"
        if identity == "inference":
            assert "is registered with what is no address" in said
