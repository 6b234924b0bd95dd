"""Who gets in, over what, and what a refused client hears."""

import os
import re
import shutil
import signal
import socket
import ssl
import struct
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trustme
from anyio.abc import SocketAttribute, SocketStream
from integration.security.conftest import RUN
from integration.security.secured import Secured, auth_init, make_certificates

from lachesis.pipeline.bus.config import ConnectionConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.errors import AccessError, NotFoundError, StartupError
from lachesis.schemas import keys, subjects
from lachesis.schemas.errors import ConfigError, LachesisError
from lachesis.schemas.subjects import BUCKET, EVENTS, ROLLOUTS
from lachesis.services.process.service_process import EXIT_NOT_PERMITTED

SHORT = {"connect_timeout_s": 30.0, "give_up_s": 15.0}
"""Who waits in vain is informed, by another error than who is refused."""


async def test_nobody_without_a_key(secured: Secured) -> None:
    ca_file = str(secured.folder / "ca.pem")
    stranger = ConnectionConfig(url=secured.address, ca_file=ca_file)
    with pytest.raises(AccessError, match="wants credentials, and none were given"):
        await connect(run="one", name="test", config=stranger)
    with pytest.raises(AccessError, match="does not take the token"):
        await connect(run="one", name="test", config=stranger, token=secured.token)


@pytest.mark.slow
async def test_nobody_with_a_key_that_the_server_does_not_know(secured: Secured, tmp_path: Path) -> None:
    auth_init(tmp_path, config='run = "one"')
    with pytest.raises(AccessError, match=r"does not know the key .*scorer\.nk: no account.*auth init.*reload"):
        await secured.bus("scorer", nkey_folder=str(tmp_path / "auth" / "one"))


async def test_a_missing_key_is_named(secured: Secured, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*scorer\.nk.*lachesis auth init"):
        await secured.bus("scorer", nkey_folder=str(tmp_path))


async def test_what_is_refused_names_subject_and_identity_and_says_how_to_mend_it(secured: Secured) -> None:
    async with await secured.bus("scorer") as bus:
        with anyio.fail_after(30), pytest.raises(AccessError) as caught:
            await bus.publish(subjects.ledger("one", "main"), b"", msg_id="1")
    text = str(caught.value)
    assert "test.scorer" in text
    assert "scorer.nk" in text
    assert 'publish to "rl.ledger.one.main"' in text
    assert "lachesis auth init" in text
    assert (secured.keys / "scorer.nk").read_text().strip() not in text


async def test_every_way_of_being_refused_ends_the_wait(secured: Secured) -> None:
    async def lists() -> None:
        async with await secured.bus("scorer", **SHORT) as bus, bus.read(EVENTS, []) as reader:
            await anext(aiter(reader))

    async def consumes() -> None:
        async with await secured.bus("scorer", **SHORT) as bus:
            durable = subjects.durable("teacher", "one", "live")
            async with bus.consume(ROLLOUTS, durable, [subjects.rollout("one")]) as deliveries:
                await anext(deliveries)

    async def trims() -> None:
        async with await secured.bus("environment-words") as bus:
            for number in range(2):  # of one alone nothing would be deleted
                await bus.publish(subjects.rollout("one", "words"), b"", msg_id=f"trims {number}")
        async with await secured.bus("batcher", **SHORT) as bus:
            await bus.trim(ROLLOUTS, [subjects.rollout("one")], before=10)

    async def answer(_: bytes) -> bytes:
        return b"granted"

    async def serves() -> None:
        async with (
            await secured.bus("environment-words", **SHORT) as bus,
            bus.serve(subjects.lease("one", "words"), lambda _: anyio.lowlevel.checkpoint()),  # type: ignore[arg-type,return-value]
        ):
            while True:  # it learns with the answer to some call
                await bus.usage(BUCKET)

    async def sets() -> None:
        async with await secured.bus("environment-words", **SHORT) as bus:
            await bus.put(keys.POLICY, b"mine")

    for attempt in (lists, consumes, trims, serves, sets):
        with anyio.fail_after(30), pytest.raises(AccessError, match="permissions violation"):
            await attempt()


@pytest.mark.slow
async def test_a_service_that_is_refused_ends_at_once_and_says_why(secured: Secured, tmp_path: Path) -> None:
    (tmp_path / "scorer.nk").write_text((secured.keys / "observer.nk").read_text())  # somebody mixed up the files
    sets = {"run": "one", "nats.url": secured.address, "nats.nkey_folder": tmp_path}
    sets |= {"nats.ca_file": secured.folder / "ca.pem", "folder": tmp_path / "run", "environments.words.kind": "x"}
    arguments = [f"--set={key}={value}" for key, value in sets.items()]
    with anyio.fail_after(120):
        done = await anyio.run_process(
            [sys.executable, "-m", "lachesis", "run", "scorer", *arguments], check=False, cwd=tmp_path
        )
    assert done.returncode == EXIT_NOT_PERMITTED, done.stderr.decode()
    last = done.stderr.decode().strip().splitlines()[-1]
    assert "one.scorer" in last
    assert "was refused by the server" in last
    assert "lachesis auth init" in last
    assert b"Traceback" not in done.stderr


async def test_runs_do_not_see_each_other(secured: Secured, streams_config: StreamsConfig) -> None:
    other = {"nkey_folder": str(secured.folder / "auth" / "two")}
    async with await secured.bus("environment-words") as bus:
        await bus.publish(subjects.rollout("one", "words"), b"of one", msg_id="1")
    async with await secured.bus("operator", **other) as bus:
        with pytest.raises(NotFoundError):
            await bus.usage(ROLLOUTS)
        await bus.ensure_streams(streams_config)
        assert (await bus.usage(ROLLOUTS)).messages == 0
    with pytest.raises(AccessError, match=r"rl\.rollout\.two\.words"):
        async with await secured.bus("environment-words") as bus:
            await bus.publish(subjects.rollout("two", "words"), b"of one", msg_id="2")


async def test_a_server_of_another_authority_is_refused(secured: Secured, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    for ca_file in (str(tmp_path / "ca.pem"), None):  # another one, and the system's
        with anyio.fail_after(30), pytest.raises(AccessError, match=r"cannot prove its identity.*nats\.ca_file"):
            await secured.bus("scorer", ca_file=ca_file)


async def test_a_name_that_is_not_in_the_certificate_is_refused(secured: Secured) -> None:
    url = secured.address.replace("127.0.0.1", "localhost")
    with anyio.fail_after(30), pytest.raises(AccessError, match="cannot prove its identity"):
        await secured.bus("scorer", url=url)


@pytest.mark.parametrize("asked", ["url", "ca_file"])
async def test_tls_that_was_asked_for_is_never_left_out(
    nats_server: EmbeddedServer, tmp_path: Path, asked: str
) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    url = nats_server.url.replace("nats://", "tls://") if asked == "url" else nats_server.url
    config = ConnectionConfig(url=url, ca_file=str(tmp_path / "ca.pem") if asked == "ca_file" else None)
    with anyio.fail_after(30), pytest.raises(AccessError, match="offers no TLS"):
        await connect(run="one", name="test", config=config, token=nats_server.token)


@pytest.mark.slow
async def test_clients_with_certificates(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    files = {name: str(tmp_path / name) for name in ("server.pem", "server.key", "ca.pem", "client.pem", "client.key")}
    tls = ("--cert", files["server.pem"], "--key", files["server.key"], "--client-ca", files["ca.pem"])
    auth_init(tmp_path, *tls, config='run = "one"')
    async with Secured(tmp_path, "one") as server:
        with (
            anyio.fail_after(30),
            pytest.raises((AccessError, StartupError), match=r"refuses this client's certificate.*nats\.cert_file"),
        ):
            await server.bus("operator")
        own = {"cert_file": files["client.pem"], "key_file": files["client.key"]}
        async with await server.bus("operator", **own) as bus:
            assert isinstance(bus.client._transport._io_writer.get_extra_info("ssl_object"), ssl.SSLObject)
        with pytest.raises(ConfigError, match="do not fit"):
            await server.bus("operator", cert_file=files["client.pem"], key_file=files["server.key"])


@pytest.mark.parametrize("error", [ConnectionResetError, BrokenPipeError])
async def test_a_refusal_of_which_nothing_but_its_end_arrived_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    async def hung_up(_config: object, _run: str, _name: str, _options: object, errors: list[Exception]) -> None:
        errors.append(error(32, "gone"))

    monkeypatch.setattr("lachesis.pipeline.bus.connection._attempt", hung_up)
    config = ConnectionConfig(url="tls://127.0.0.1:1", connect_timeout_s=0.01)
    with pytest.raises(StartupError, match=r"refuses this client's certificate.*nats\.cert_file"):
        await connect(run="one", name="test", config=config)


async def test_a_refused_certificate_is_named_by_the_servers_alert_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    async def refused(_config: object, _run: str, _name: str, _options: object, errors: list[Exception]) -> None:
        tried.append(1)
        alert = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required")
        alert.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
        errors.append(alert)

    monkeypatch.setattr("lachesis.pipeline.bus.connection._attempt", refused)
    config = ConnectionConfig(url="tls://me:secret-1@127.0.0.1:1")
    with anyio.fail_after(30), pytest.raises(AccessError) as caught:
        await connect(run="one", name="test", config=config)
    assert str(caught.value) == (
        "the server at tls://***@127.0.0.1:1 refuses this client's certificate (TLSV13_ALERT_CERTIFICATE_REQUIRED): "
        "set nats.cert_file and nats.key_file to one it knows"
    )
    assert len(tried) == 1


@pytest.mark.slow
async def test_keys_without_tls(tmp_path: Path) -> None:
    auth_init(tmp_path, config='run = "one"')
    async with Secured(tmp_path, "one", tls=False) as server, await server.bus("observer"):
        pass


async def test_a_server_that_hangs_up_may_want_a_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path)

    async def hang_up(client: SocketStream) -> None:
        raw = client.extra_attributes[SocketAttribute.raw_socket]()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the end is a reset
        await client.aclose()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, hang_up)
        port = listener.extra_attributes[SocketAttribute.local_port]()
        config = ConnectionConfig(
            url=f"tls://127.0.0.1:{port}", ca_file=str(tmp_path / "ca.pem"), connect_timeout_s=0.2
        )
        with anyio.fail_after(30), pytest.raises(StartupError, match=r"hangs up.*nats\.cert_file"):
            await connect(run="one", name="test", config=config)
        tasks.cancel_scope.cancel()


async def test_a_server_that_comes_back_is_told_in_one_line(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with await secured.bus("scorer") as bus:
        name = bus._link.nc.node_name
        await secured.end()
        await bus.until_down()
        await secured.start_again()
        await bus.until_up()
        assert name.startswith("lachesis-")
    (line,) = [record.getMessage() for record in caplog.records if record.name in {"asyncio", "lachesis", "nats"}]
    assert re.fullmatch(rf"lost {name}; connected to it again after \d+\.\d s", line)


async def test_an_account_that_a_reload_has_added_is_sent_to_the_next_reload_and_not_to_the_servers_options(
    secured_files: Path, tmp_path: Path
) -> None:
    """The server connects a new account's imports only when it reloads once more."""
    folder = tmp_path / "server"
    shutil.copytree(secured_files, folder)
    whole = (folder / "auth.conf").read_text()
    (folder / "auth.conf").write_text(whole.replace('  include "auth/two.conf"\n', ""))
    async with Secured(folder, "two") as server:
        (folder / "auth.conf").write_text(whole)
        os.kill(server.pid, signal.SIGHUP)
        said = ""
        with anyio.fail_after(60):
            while "reload the server once more" not in said:
                with pytest.raises(LachesisError) as raised:
                    await server.bus("operator")
                said = str(raised.value)
                assert "-js" not in said
        os.kill(server.pid, signal.SIGHUP)
        with anyio.fail_after(60):
            while True:
                with suppress(LachesisError):
                    async with await server.bus("operator"):
                        return


@pytest.mark.slow
async def test_a_certificate_that_expired_while_the_run_went_on_is_named_when_it_connects_again(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    def issue(**until: Any) -> None:
        issued = authority.issue_cert("127.0.0.1", **until)
        issued.private_key_pem.write_to_path(tmp_path / "server.key")
        (tmp_path / "server.pem").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))

    issue()
    auth_init(tmp_path, "--cert", str(tmp_path / "server.pem"), "--key", str(tmp_path / "server.key"), config=RUN)
    async with Secured(tmp_path, "one") as server, await server.bus("operator") as bus:
        issue(not_after=datetime.now(UTC) - timedelta(hours=1))
        os.kill(server.pid, signal.SIGKILL)
        await server.wait()
        await server.start_again()
        with anyio.fail_after(60):
            while "certificate has expired" not in str(bus.stall):  # noqa: ASYNC110 - the client offers nothing to wait on
                await anyio.sleep(0.05)
        issue()
        os.kill(server.pid, signal.SIGHUP)
        with anyio.fail_after(60):
            while bus.stall is not None:  # noqa: ASYNC110 - as above
                await anyio.sleep(0.05)
