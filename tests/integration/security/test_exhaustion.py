"""What one key can use up for the others is said by `doctor` and `status`, with its name, and the operator frees it."""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import msgspec
import pytest
from integration.security.conftest import RUN
from integration.security.secured import Secured, auth_init
from nats.aio.client import Client

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.consumer_names import reader_names
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import AccessError, StreamFullError
from lachesis.pipeline.notices.text import notice_line
from lachesis.schemas import keys, subjects
from lachesis.schemas.subjects import BUCKET, ROLLOUTS, STREAMS, stream_name
from lachesis.services.observe.live_run_state import look_at_run
from lachesis.services.observe.run_state import RunState
from lachesis.services.preflight.server import check_server

SMALL = StreamsConfig(
    rollouts_bytes=4 << 20, events_bytes=1 << 20, replay_bytes=1 << 20, teacher_bytes=1 << 20, ledger_bytes=1 << 20,
    bucket_bytes=1 << 20,
)  # fmt: skip

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def server(make_secured: Callable[[], AbstractAsyncContextManager[Secured]]) -> AsyncIterator[Secured]:
    """A server for each test, with small streams of the run `one`."""
    async with make_secured() as made:
        async with await made.bus(OPERATOR) as operator:
            await operator.ensure_streams(SMALL)
        yield made


@pytest.fixture
def config(server: Secured, tmp_path: Path) -> RunConfig:
    (tmp_path / "run.toml").write_text(RUN)
    found = load(run_config_type(), file=tmp_path / "run.toml").config
    return msgspec.structs.replace(found, streams=SMALL, nats=server.config(), folder=str(tmp_path / "run"))


async def said(config: RunConfig) -> tuple[list[str], list[str]]:
    """Return what `doctor` and `status` warn of, finding and mend in one."""
    snapshots: list[RunState] = []
    doctor = [f"{one.check}: {one.text}. {one.mend}" for one in await check_server(config) if one.level == "WARN"]
    await look_at_run(config, snapshots.append)
    return doctor, [notice_line(one) for one in snapshots[0].notices]


async def both_say(config: RunConfig, *parts: str) -> None:
    doctor, status = await said(config)
    for told in (doctor, status):
        assert [text for text in told if all(part in text for part in parts)], (parts, doctor, status)


async def both_are_content(config: RunConfig) -> None:
    doctor, status = await said(config)
    assert not [text for text in (*doctor, *status) if "consumers of" in text or "taken" in text], (doctor, status)


async def gc(server: Secured, folder: Path, *arguments: str) -> dict[str, object]:
    command = [sys.executable, "-m", "lachesis", "gc", *arguments, "--yes", "--json", "--config", "run.toml"]
    done = await anyio.run_process([*command, *server.arguments], cwd=folder)
    found: dict[str, object] = json.loads(done.stdout)
    return found


async def use_up_readers(client: Client, stream: str, identity: str) -> None:
    for name in [*reader_names(identity), *(f"{identity}={n}" for n in range(200, 300)), "anything"]:
        body = {"stream_name": stream, "config": {"name": name, "durable_name": name, "ack_policy": "none"}}
        await client.publish(f"$JS.API.CONSUMER.CREATE.{stream}.{name}", msgspec.json.encode(body))
    await client.request("$JS.API.INFO", timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize(("identity", "kind"), [("health", "EVENTS"), ("scorer", "ROLLOUTS")])
async def test_who_has_used_up_its_readers_is_named_and_the_operator_frees_them(
    server: Secured, config: RunConfig, tmp_path: Path, identity: str, kind: str
) -> None:
    async with server.client(identity) as client:
        await use_up_readers(client, stream_name("one", kind), identity)
    most = len(reader_names(identity))
    await both_say(
        config,
        f"consumers of {stream_name('one', kind)}: {identity} has {most} of the {most} readers",
        "lachesis gc --consumers --yes",
    )
    freed = await gc(server, tmp_path, "--consumers")
    assert sorted(freed["readers"][kind]) == sorted(reader_names(identity))  # type: ignore[index]
    await both_are_content(config)


async def fill(client: Client, subject: str, size: int) -> None:
    """Store on `subject` until the server has no more room."""
    for number in range(10_000):
        name = subject.replace("#", str(number))
        answer = await client.request(name, bytes(size), timeout=30)
        if b"error" in answer.data:
            return
    raise AssertionError("the stream is never full")


@pytest.mark.parametrize(
    "subject", ["rl.rollout.one.words", pytest.param("rl.blob.rollout.one.words.#", marks=pytest.mark.slow)]
)
async def test_an_environment_that_fills_the_rollouts_is_named_and_shut_out(
    server: Secured, config: RunConfig, subject: str
) -> None:
    async with server.client("environment-words") as client:
        await fill(client, subject, 100_000)
        async with await server.bus("environment-far", give_up_s=1.0) as far:
            with pytest.raises(StreamFullError):
                await far.publish("rl.rollout.one.far", bytes(100_000), msg_id="1")
        await both_say(
            config, f"stream {stream_name('one', ROLLOUTS)}", "newest messages are of environment-words (100 %)",
            "lachesis auth init",
        )  # fmt: skip
        seed = server.keys / "environment-words.nk"
        old = seed.read_text()
        seed.unlink()
        auth_init(server.folder, config=RUN)
        os.kill(server.pid, signal.SIGHUP)
        with anyio.fail_after(30):
            while client.is_connected:  # noqa: ASYNC110 - the client gives no sign
                await anyio.sleep(0.02)
    seed.write_text(old)
    with pytest.raises(AccessError):
        await server.bus("environment-words")


@pytest.mark.slow
async def test_a_scorer_that_fills_the_bucket_is_named_and_the_operator_empties_it(
    server: Secured, config: RunConfig, tmp_path: Path
) -> None:
    async with server.client("scorer") as client:
        await fill(client, subjects.value_subject("one", keys.attempts("scorer=one=live", "#")), 5000)
    async with await server.bus("trainer", give_up_s=1.0) as trainer:
        with pytest.raises(StreamFullError):
            await trainer.put(keys.POLICY, bytes(10_000))
        await both_say(
            config, f"stream {stream_name('one', BUCKET)}", "its keys are of scorer (100 %)",
            "lachesis gc --attempts --yes",
        )  # fmt: skip
        freed = await gc(server, tmp_path, "--attempts")
        assert freed["attempts"]["scorer=one=live"] > 100  # type: ignore[index]
        await trainer.put(keys.POLICY, bytes(10_000))
    await both_are_content(config)


async def test_nobody_but_the_operator_makes_or_changes_a_stream(server: Secured) -> None:
    """So no identity can take storage that the run's streams have reserved, or streams that the account may have."""
    async with await server.bus(OPERATOR) as operator:
        for identity in ("environment-words", "trainer", "governor", "observer"):
            async with server.client(identity) as client:
                for name in ("mine", stream_name("one", ROLLOUTS), "lachesis_more_ROLLOUTS"):
                    body = msgspec.json.encode({"name": name, "subjects": ["x.>"], "max_bytes": 1 << 40})
                    for verb in ("CREATE", "UPDATE"):
                        await client.publish(f"$JS.API.STREAM.{verb}.{name}", body)
                await client.request("$JS.API.INFO", timeout=30)
        assert {kind.name for kind in await operator.describe_streams()} == {
            stream_name("one", kind) for kind in (*STREAMS, BUCKET)
        }
        assert await operator.runs() == ["one"]
