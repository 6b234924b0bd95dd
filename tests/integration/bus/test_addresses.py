"""Servers as people have them: credentials with odd characters, IPv6, leaf nodes, narrow permissions, small disks."""

import importlib.util
import socket
from pathlib import Path
from urllib.parse import quote

import pytest
from integration.bus.test_connection import SMALL, CustomServer

from lachesis.pipeline.bus.config import ConnectionConfig, ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.errors import AccessError, StartupError
from lachesis.schemas import subjects
from lachesis.schemas.subjects import LEDGER
from lachesis.services.preflight.room import read_monitor, try_room

USER, PASSWORD = "us/er", "p@ss:w%/#rd?"
SHORT = ConnectionConfig(connect_timeout_s=3.0, give_up_s=5.0)


def with_jetstream(tmp_path: Path, text: str = "") -> str:
    return f'max_payload: 8MB\njetstream {{ store_dir: "{tmp_path}/js" }}\n{text}'


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def test_credentials_in_an_address_are_decoded_and_those_of_a_file_go_as_they_are(tmp_path: Path) -> None:
    text = with_jetstream(tmp_path, f'authorization {{ user: "{USER}", password: "{PASSWORD}" }}')
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    async with CustomServer(tmp_path / "store", text) as server:
        named = server.url.replace("://", f"://{quote(USER, safe='')}:{quote(PASSWORD, safe='')}@")
        async with await connect(named, run="run", name="test", config=SHORT) as bus:
            await bus.ensure_streams(SMALL)
        by_file = ConnectionConfig(url=server.url, user=USER, password_file=str(file))
        async with await connect(run="run", name="test", config=by_file):
            pass
        with pytest.raises(AccessError, match=r"does not take the credentials in nats\.url"):
            await connect(named.replace("%3F", "%2F"), run="run", name="test", config=SHORT)


async def test_a_token_in_an_address_is_decoded(tmp_path: Path) -> None:
    text = with_jetstream(tmp_path, 'authorization { token: "a/b=c" }')
    async with CustomServer(tmp_path / "store", text) as server:
        url = server.url.replace("://", "://a%2Fb%3Dc@")
        async with await connect(url, run="run", name="test", config=SHORT) as bus:
            assert await bus.runs() == []


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
async def test_a_server_on_ipv6_is_reached_and_its_monitoring_asked(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "nats", ServerConfig(host="::1")) as server:
        assert server.url.startswith("nats://[::1]:")
        async with await connect(server.url, run="run", name="test", token=server.token, config=SHORT) as bus:
            await bus.ensure_streams(SMALL)
            assert bus.client.connected_url.hostname == "::1"
    assert await read_monitor("::1", "another") is None


async def test_a_run_is_stored_in_the_domain_at_the_other_end_of_a_leaf_node(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hub_text = f"""
server_name: hub
max_payload: 8MB
jetstream {{ store_dir: "{tmp_path}/hub", domain: hub }}
leafnodes {{ listen: "127.0.0.1:{port}" }}"""
    leaf_text = f"""
server_name: leaf
max_payload: 8MB
jetstream {{ store_dir: "{tmp_path}/leaf", domain: leaf }}
leafnodes {{ remotes [ {{ url: "nats://127.0.0.1:{port}" }} ] }}"""
    async with CustomServer(tmp_path / "h", hub_text) as hub, CustomServer(tmp_path / "l", leaf_text) as leaf:
        far = ConnectionConfig(url=leaf.url, domain="hub", connect_timeout_s=20.0)
        async with await connect(run="run", name="far", config=far) as bus:
            await bus.ensure_streams(SMALL)
            subject = subjects.ledger("run", "trainer")
            stored = await bus.publish(subject, b"entry", msg_id="1")
            revision = await bus.put("supervisor", b"value", revision=0)
            async with bus.read(LEDGER, [], start=1, follow=False) as messages:
                assert [message.data async for message in messages] == [b"entry"]
        async with await connect(hub.url, run="run", name="near", config=SHORT) as bus:
            entry = await bus.value("supervisor")
            assert entry is not None
            assert (entry.value, entry.revision) == (b"value", revision)
            assert (await bus.usage(LEDGER)).last == stored.seq
        async with await connect(leaf.url, run="run", name="near", config=SHORT) as bus:
            assert await bus.runs() == []
        nowhere = ConnectionConfig(url=leaf.url, domain="nowhere", connect_timeout_s=1.0)
        with pytest.raises(StartupError, match=r"reaches no JetStream of the domain 'nowhere' \(its own is 'leaf'\)"):
            await connect(run="run", name="test", config=nowhere)


async def test_an_inbox_that_the_account_does_not_allow_is_named(tmp_path: Path) -> None:
    text = with_jetstream(
        tmp_path,
        "authorization { users = [ { user: a, password: b, permissions: {"
        ' subscribe: { allow: ["rl.>", "_INBOX_mine.>"] }, publish: ">" } } ] }',
    )
    async with CustomServer(tmp_path / "store", text) as server:
        url = server.url.replace("://", "://a:b@")
        with pytest.raises(AccessError, match=r"set nats\.inbox_prefix to what this user may subscribe to") as caught:
            await connect(url, run="run", name="test", config=SHORT)
        assert "auth init" not in str(caught.value)
        mine = ConnectionConfig(url=url, inbox_prefix="_INBOX_mine", connect_timeout_s=3.0)
        async with await connect(run="run", name="test", config=mine) as bus:
            await bus.ensure_streams(SMALL)


async def test_a_port_that_does_not_greet_is_no_server_that_is_away(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quick = ConnectionConfig(connect_timeout_s=0.1)
    async with CustomServer(tmp_path / "store", with_jetstream(tmp_path, f"http: 127.0.0.1:{port}")):
        with pytest.raises(StartupError, match=r"does not greet as a nats-server does.*monitoring.*tls_first = true"):
            await connect(f"nats://127.0.0.1:{port}", run="run", name="test", config=quick)
    with pytest.raises(StartupError, match="no nats-server answers"):
        await connect(f"nats://127.0.0.1:{port}", run="run", name="test", config=quick)


async def test_a_port_for_other_servers_is_named_as_that(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quick = ConnectionConfig(connect_timeout_s=3.0)
    leaves = f'leafnodes {{ host: "127.0.0.1", port: {port} }}'
    async with CustomServer(tmp_path / "store", with_jetstream(tmp_path, leaves)):
        with pytest.raises(StartupError, match=r"another port of a nats-server \(.*leaf node port.*name the one for"):
            await connect(f"nats://127.0.0.1:{port}", run="run", name="test", config=quick)


@pytest.mark.skipif(importlib.util.find_spec("aiohttp") is not None, reason="aiohttp is installed")
async def test_a_websocket_without_its_package_is_no_fault_of_the_server() -> None:
    with pytest.raises(StartupError, match=r"needs the package aiohttp: pip install aiohttp"):
        await connect("ws://127.0.0.1:1", run="run", name="test", config=SHORT)


async def test_a_server_that_says_nothing_of_its_limit_is_tried(tmp_path: Path) -> None:
    text = f'max_payload: 8MB\njetstream {{ store_dir: "{tmp_path}/js", max_file_store: 1GB }}'
    async with CustomServer(tmp_path / "store", text) as server:
        bus = await connect(server.url, run="run", name="test", config=SHORT)
        async with bus:
            large = await try_room(bus, StreamsConfig(), "run", {})
            small = await try_room(bus, SMALL, "run", {})
            assert await bus.reserved_bytes() == {}
    assert large is not None
    assert (large.level, "insufficient storage" in large.text) == ("FAIL", True)
    assert small is not None
    assert small.level == "OK"


async def test_who_may_make_no_stream_hears_that_the_room_is_not_known(tmp_path: Path) -> None:
    text = with_jetstream(
        tmp_path,
        "authorization { users = [ { user: a, password: b,"
        ' permissions: { publish: { deny: "$JS.API.STREAM.>" } } } ] }',
    )
    async with CustomServer(tmp_path / "store", text) as server:
        url = server.url.replace("://", "://a:b@")
        async with await connect(url, run="run", name="test", config=SHORT) as bus:
            found = await try_room(bus, SMALL, "run", {})
            assert found is not None
            assert found.level == "WARN"
            assert "not known" in found.text
            assert bus._link.failure is None
