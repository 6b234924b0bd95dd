"""What connecting finds out, and what the server refuses later."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from integration.harness import alive, until
from integration.proxy import open_proxy

from lachesis.pipeline.bus import request_reply
from lachesis.pipeline.bus.client import NatsClient
from lachesis.pipeline.bus.config import ConnectionConfig, ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.errors import AccessError, BusClosedError, InfrastructureError, StartupError, StreamFullError
from lachesis.schemas import keys, subjects
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import BUCKET, ROLLOUTS, STREAMS, stream_subjects

MATH = subjects.rollout("run", "math")
SMALL = StreamsConfig(**{f"{kind.lower()}_bytes": 1 << 20 for kind in (*STREAMS, "bucket")})
SHORT = ConnectionConfig(connect_timeout_s=0.5, give_up_s=3.0)


class CustomServer(EmbeddedServer):
    """An embedded server with a configuration of the test's own."""

    def __init__(self, store: Path, text: str) -> None:
        super().__init__(store, ServerConfig())
        self.text = text

    def _config_text(self) -> str:
        return f'listen: "127.0.0.1:{self._port or -1}"\nports_file_dir: "{self.store}"\n{self.text}'


def with_token(token: str) -> str:
    return f'authorization {{ token: "{token}" }}\njetstream {{ store_dir: "js" }}\nmax_payload: 8388608\n'


async def keep_sending(bus: NatsBus) -> None:
    while True:
        await bus.broadcast("rl.x", b"")
        await anyio.sleep(0.05)


async def test_credentials_that_are_refused_while_it_is_connected_may_be_waited_for(tmp_path: Path) -> None:
    def let_in(token: str) -> None:
        server.text = with_token(token).replace('"js"', f'"{tmp_path / "js"}"')
        (server.store / "nats-server.conf").write_text(server._config_text())
        os.kill(server.pid, signal.SIGHUP)

    server = CustomServer(tmp_path, with_token("right").replace('"js"', f'"{tmp_path / "js"}"'))
    config = ConnectionConfig(give_up_s=600.0)
    async with server:
        options = {"run": "run", "token": "right", "config": config}
        async with (
            await connect(server.url, name="other", **options) as other,
            await connect(server.url, name="mine", **options) as mine,
        ):
            mine.outlast_refusals()
            let_in("wrong")
            with anyio.fail_after(60):
                while not mine.refusal:  # noqa: ASYNC110 - it is about another process
                    await anyio.sleep(0.05)
                assert "no longer takes the credentials of mine" in mine.refusal
                with pytest.raises(AccessError, match="no longer takes the credentials of other"):
                    await keep_sending(other)
                let_in("right")
                while mine.refusal:  # noqa: ASYNC110 - it is about another process
                    await anyio.sleep(0.05)


async def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(StartupError, match=rf"no nats-server answers at nats://\*\*\*@127.0.0.1:{port}") as caught:
        await connect(f"nats://user:secret@127.0.0.1:{port}", run="run", name="test", config=SHORT)
    assert "secret" not in str(caught.value)


async def test_a_client_that_cancels_what_it_waits_for_itself_cancels_nobody_else(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(*_: object, **__: object) -> None:
        raise asyncio.CancelledError

    bus = await connect(nats_server.url, run="r", name="t", token=nats_server.token)
    with monkeypatch.context() as patch:
        patch.setattr(NatsClient, "close", cancelled)
        await bus.close()
    await bus.close()
    connects = NatsClient.connect

    async def connect_and_cancel(*arguments: Any, **options: Any) -> None:
        await connects(*arguments, **options)
        raise asyncio.CancelledError

    monkeypatch.setattr(NatsClient, "connect", connect_and_cancel)
    with pytest.raises(StartupError, match="the connection ended meanwhile"):
        await connect(nats_server.url, run="r", name="t", token=nats_server.token, config=SHORT)
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as silent, anyio.move_on_after(0.2) as scope:
        await connect(f"nats://127.0.0.1:{silent.getsockname()[1]}", run="r", name="t")
    assert scope.cancelled_caught  # one that was requested stays what it is


async def test_something_else_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        with anyio.fail_after(60), pytest.raises(StartupError, match="does not greet as a nats-server does"):
            await connect(url, run="run", name="test", config=SHORT)


async def test_a_server_without_jetstream(tmp_path: Path) -> None:
    async with CustomServer(tmp_path, "") as server:
        with pytest.raises(StartupError, match="no JetStream"):
            await connect(server.url, run="run", name="test", config=SHORT)


async def test_a_server_that_takes_too_small_messages(tmp_path: Path) -> None:
    """As it comes, a server takes 1 MiB, where a group or a commit may have several."""
    async with CustomServer(tmp_path / "store", f'jetstream {{ store_dir: "{tmp_path}/js" }}') as server:
        with pytest.raises(StartupError, match="set max_payload: 8MB"):
            await connect(server.url, run="run", name="test", config=SHORT)


async def test_an_old_server(nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lachesis.pipeline.bus.connection.MIN_SERVER_VERSION", (99, 0))
    with pytest.raises(StartupError, match=r"is 2\.\d+\.\d+; 99\.0 or newer is needed"):
        await connect(nats_server.url, run="run", name="test", token=nats_server.token)


async def test_secrets_from_files(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(nats_server.token + "\n")
    config = ConnectionConfig(url=nats_server.url, token_file=str(tmp_path / "token"))
    async with await connect(run="run", name="test", config=config) as bus:
        assert await bus.describe_streams() == []
    with pytest.raises(ConfigError, match=r"nats\.token_file: there is no file"):
        await connect(run="run", name="test", config=ConnectionConfig(token_file=str(tmp_path / "none")))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match=r"nats\.token_file: file .* is empty"):
        await connect(run="run", name="test", config=ConnectionConfig(token_file=str(tmp_path / "empty")))


@pytest.fixture
async def restricted(tmp_path: Path, streams_config: StreamsConfig) -> AsyncIterator[tuple[CustomServer, NatsBus]]:
    text = f"""
max_payload: 8MB
jetstream {{ store_dir: "{tmp_path}/js" }}
authorization {{ users = [
  {{ user: admin, password: admin }}
  {{ user: producer, password: p, permissions: {{
       publish: ["rl.rollout.run.math", "$JS.API.INFO"], subscribe: ["_INBOX.>"] }} }}
] }}"""
    async with CustomServer(tmp_path / "store", text) as server:
        admin = server.url.replace("://", "://admin:admin@")
        async with await connect(admin, run="run", name="admin") as bus:
            await bus.ensure_streams(streams_config)
        async with await connect(server.url.replace("://", "://producer:p@"), run="run", name="producer") as bus:
            yield server, bus


async def test_a_refused_subject_is_fatal_and_named(restricted: tuple[CustomServer, NatsBus]) -> None:
    _, bus = restricted
    assert (await bus.publish(MATH, b"", msg_id="1")).seq == 1
    with anyio.fail_after(60), pytest.raises(AccessError, match=r"rl\.rollout\.run\.code"):
        await bus.publish(subjects.rollout("run", "code"), b"", msg_id="2")
    with pytest.raises(AccessError):  # the process cannot do its work: every call says so
        await bus.publish(MATH, b"", msg_id="3")
    with pytest.raises(AccessError):
        await bus.usage(ROLLOUTS)


async def test_a_refused_subject_reaches_those_who_wait(restricted: tuple[CustomServer, NatsBus]) -> None:
    _, bus = restricted
    with anyio.fail_after(60), pytest.raises(AccessError):
        async with bus.listen("rl.heartbeat.>") as beats:
            await anext(beats)


async def test_closing_ends_every_wait(nats_bus: NatsBus, nats_server: EmbeddedServer) -> None:
    ended = []

    async def waits(bus: NatsBus, kind: str) -> None:
        with pytest.raises(BusClosedError):  # noqa: PT012
            if kind == "read":
                async with bus.read(ROLLOUTS, []) as reader:
                    await anext(aiter(reader))
            elif kind == "consume":
                async with bus.consume(ROLLOUTS, "d", []) as deliveries:
                    await anext(deliveries)
            elif kind == "listen":
                async with bus.listen("rl.heartbeat.>") as beats:
                    await anext(beats)
            else:
                async with bus.watch(keys.POLICY) as entries:
                    await anext(entries)
        ended.append(kind)

    bus = await connect(nats_server.url, run="run", name="test", token=nats_server.token)
    async with anyio.create_task_group() as tasks:
        for kind in ("read", "consume", "listen", "watch"):
            tasks.start_soon(waits, bus, kind)
        await anyio.sleep(0.2)
        await bus.close()
    assert sorted(ended) == ["consume", "listen", "read", "watch"]
    with pytest.raises(BusClosedError):
        await bus.publish(MATH, b"", msg_id="1")


async def test_streams_are_made_once_and_migrated(nats_bus: NatsBus, streams_config: StreamsConfig) -> None:
    assert await nats_bus.ensure_streams(streams_config) == []
    names = [s.name for s in await nats_bus.describe_streams()]
    assert names == [*(f"lachesis_run_{kind}" for kind in STREAMS), "KV_lachesis_run"]
    await nats_bus.publish(MATH, b"kept", msg_id="1")
    larger = StreamsConfig(**{**{f: getattr(streams_config, f) for f in streams_config.__struct_fields__},
                              "rollouts_bytes": 300 << 20})  # fmt: skip
    changed = f"changed lachesis_run_ROLLOUTS: max_bytes {256 << 20} -> {300 << 20}"
    assert await nats_bus.ensure_streams(larger) == [changed]
    assert (await nats_bus.usage(ROLLOUTS)).max_bytes == 300 << 20
    assert (await nats_bus.get(ROLLOUTS, 1)).data == b"kept"


async def test_a_stream_keeps_its_size_until_one_is_set(nats_bus: NatsBus, streams_config: StreamsConfig) -> None:
    roomy = msgspec.structs.replace(streams_config, rollouts_bytes=3 << 30, teacher_bytes=1 << 20)
    await nats_bus.ensure_streams(roomy)
    unset = msgspec.structs.replace(roomy, rollouts_bytes=None, teacher_bytes=None)
    grown = f"changed lachesis_run_TEACHER: max_bytes {1 << 20} -> {unset.budgets()['TEACHER']}"
    assert await nats_bus.ensure_streams(unset) == [grown]
    assert (await nats_bus.usage(ROLLOUTS)).max_bytes == 3 << 30
    smaller = msgspec.structs.replace(unset, rollouts_bytes=1 << 20)
    await nats_bus.ensure_streams(smaller)
    assert (await nats_bus.usage(ROLLOUTS)).max_bytes == 1 << 20


async def test_a_stream_that_cannot_be_migrated(nats_bus: NatsBus, streams_config: StreamsConfig) -> None:
    link = nats_bus._link
    await nats_bus.delete_stream("EVENTS")
    events = stream_subjects("run")["EVENTS"]
    await link.nc.jetstream().add_stream(name="lachesis_run_EVENTS", subjects=events, storage="memory")
    with pytest.raises(ConfigError, match=r"EVENTS exists and cannot be changed in place .*storage memory -> file"):
        await nats_bus.ensure_streams(streams_config)


async def test_budgets_beyond_the_servers_say_who_has_reserved_how_much(
    nats_bus: NatsBus, streams_config: StreamsConfig
) -> None:
    reserved = f"Reserved are, in bytes: run run {streams_config.total_bytes():,}"
    with pytest.raises(ConfigError, match=f"no room for stream lachesis_run_ROLLOUTS .*{reserved}"):
        await nats_bus.ensure_streams(msgspec.structs.replace(streams_config, rollouts_bytes=1 << 50))


async def test_each_run_has_streams_of_its_own(nats_bus: NatsBus, nats_server: EmbeddedServer) -> None:
    other_math = subjects.rollout("other", "math")
    async with await connect(nats_server.url, run="other", name="test", token=nats_server.token) as other:
        assert len(await other.ensure_streams(SMALL)) == len(STREAMS) + 1
        assert await nats_bus.runs() == ["other", "run"]
        assert (await nats_bus.publish(MATH, b"ours", msg_id="1")).seq == 1
        assert (await other.publish(other_math, b"theirs", msg_id="1")).seq == 1  # neither counts what the other stores
        with pytest.raises(StreamFullError):
            await other.publish(other_math, bytes(1 << 20), msg_id="2")
        await nats_bus.publish(MATH, bytes(1 << 20), msg_id="2")  # nor is one full because the other is
        assert (await nats_bus.put(keys.POLICY, b"ours"), (await other.value(keys.POLICY))) == (1, None)
        for kind in (*STREAMS, BUCKET):
            await other.delete_stream(kind)
        assert (await other.runs(), await other.describe_streams()) == (["run"], [])
    assert (await nats_bus.get(ROLLOUTS, 1)).data == b"ours"


async def test_streams_that_were_never_made(fresh_server: EmbeddedServer) -> None:
    async with await connect(fresh_server.url, run="run", name="test", token=fresh_server.token, config=SHORT) as bus:
        with pytest.raises(InfrastructureError, match=r"there is no stream lachesis_run_ROLLOUTS: .*`lachesis init`"):
            await bus.publish(MATH, b"", msg_id="1")


async def test_credentials_that_came_too_late_are_not_refused(tmp_path: Path) -> None:
    """A network that stood still while a client connected: the server gives up on it, and takes the next attempt."""
    text = (
        'authorization { token: "t", timeout: 0.2 }\n'
        f'max_payload: 8MB\njetstream {{ store_dir: "{tmp_path}/js", max_file_store: 64MB }}'
    )
    async with (
        CustomServer(tmp_path / "store", text) as server,
        open_proxy(int(server.url.rpartition(":")[2])) as proxy,
        await connect(f"nats://127.0.0.1:{proxy.port}", run="run", name="test", token="t") as bus,
        anyio.create_task_group() as tasks,
    ):
        link = bus._link
        while "authentication timeout" not in str(link.last_error).lower():
            tasks.start_soon(proxy.silence, 0.6)
            proxy.cut()
            with anyio.fail_after(60):
                await link.wait_down()
                await link.wait_up()
        assert await bus.describe_streams() == []


async def test_closing_while_the_server_goes_is_no_error(tmp_path: Path) -> None:
    async with (
        EmbeddedServer(tmp_path) as server,
        await connect(server.url, run="run", name="test", token=server.token) as bus,
    ):
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
        await bus.client.publish("unread", b"so that its end resets the connection")
        await anyio.wait_all_tasks_blocked()  # which is when it was sent
        os.kill(pid, signal.SIGKILL)
        while alive(pid):
            pass  # nor is the client to read of the end before it writes
        await bus.client.publish("unsent", b"")
        await bus.close()


async def test_no_attempt_to_reconnect_outlives_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trying, swallowed = anyio.Event(), anyio.Event()

    async def refused_when_cancelled(*_: object, **__: object) -> None:
        trying.set()
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            if swallowed.is_set():
                raise
            swallowed.set()  # `wait_for` of Python 3.11 does this where both come at once
            raise ConnectionRefusedError from None

    async with EmbeddedServer(tmp_path) as server:
        bus = await connect(server.url, run="run", name="test", token=server.token)
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: any(one.reconnects > 1 for one in bus.client._server_pool), 60)
        monkeypatch.setattr("lachesis.pipeline.bus.transport.Transport.connect", refused_when_cancelled)
        await trying.wait()
        await bus.close()

    def attempts() -> list[object]:
        return [task for task in asyncio.all_tasks() if "_attempt_reconnect" in repr(task)]

    await until(lambda: not attempts(), 30)
    assert swallowed.is_set()


async def test_a_dead_peer_that_takes_in_nothing_does_not_hold_up_the_next(
    fresh_server: EmbeddedServer, streams_config: StreamsConfig
) -> None:
    """As where a machine loses its power: no connection ends, and what was written is never taken in."""
    port = int(fresh_server.url.rpartition(":")[2])
    async with open_proxy(port) as one, open_proxy(port) as other:
        url = f"nats://127.0.0.1:{one.port},nats://127.0.0.1:{other.port}"
        async with await connect(url, run="run", name="test", token=fresh_server.token) as bus:
            await bus.ensure_streams(streams_config)
            dead, living = (one, other) if one.connections else (other, one)
            dead.hold_back()
            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:
                    for i in range(40):  # more than the sockets on the way take
                        tasks.start_soon(partial(bus.publish, MATH, bytes(400_000), msg_id=f"dead-{i}"))
            assert living.connections
            assert (await bus.extent(ROLLOUTS, MATH)).messages == 40
            dead.pass_on()


async def test_requests_that_wait_are_bounded_in_bytes(nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reply, "_MAX_WAITING_BYTES", 1000)
    subject, outcomes = subjects.lease("run", "words"), list[str]()
    begun, release = anyio.Event(), anyio.Event()

    async def answer(_: bytes) -> bytes:
        begun.set()
        await release.wait()
        return b"done"

    async def request() -> None:
        try:
            outcomes.append((await nats_bus.request(subject, bytes(600), timeout_s=30)).decode())
        except InfrastructureError as error:
            outcomes.append(str(error))
            release.set()

    async with nats_bus.serve(subject, answer), anyio.create_task_group() as tasks:
        tasks.start_soon(request)
        await begun.wait()
        tasks.start_soon(request)  # waits
        tasks.start_soon(request)  # there is no more room
    assert outcomes == [f"{subject}: too many requests wait (503)", "done", "done"]
