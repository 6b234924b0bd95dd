"""The embedded server: what goes wrong at start is said, and nothing is left behind."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from integration.harness import alive

from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer, find_binary, read_endpoint
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.errors import AccessError, StartupError


async def test_start_and_stop(tmp_path: Path) -> None:
    store = tmp_path / 'a "store" with $odd ünicode'
    async with EmbeddedServer(store) as server:
        pid = server.pid
        endpoint = read_endpoint(store)
        assert (endpoint.url, endpoint.token, endpoint.pid) == (server.url, server.token, pid)
        assert server.url.startswith("nats://127.0.0.1:")
        assert server.token not in server.url + repr(server) + repr(endpoint) + server.log_path.read_text()
        for name in ("nats-server.conf", "endpoint.json", "nats-server.log"):
            assert stat.S_IMODE((store / name).stat().st_mode) == 0o600
        async with await connect(server.url, run="run", name="test", token=server.token):
            pass
        with pytest.raises(StartupError, match="runs already"):
            await server.start()
    assert not alive(pid)
    with pytest.raises(StartupError, match="no server runs"):
        read_endpoint(store)


async def test_a_restart_keeps_port_token_and_data(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "store") as server:
        url, token, first = server.url, server.token, server.pid
        os.kill(first, signal.SIGKILL)
        assert await server.wait() == -signal.SIGKILL
        await server.start()
        assert (server.url, server.token) == (url, token)
        assert server.pid != first


_HOST = """
import anyio, sys
from pathlib import Path
from lachesis.pipeline.bus.embedded import EmbeddedServer

async def main():
    async with EmbeddedServer(Path(sys.argv[1])):
        print("up", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("taken", [False, True])
async def test_a_server_whose_host_was_killed_is_found_again_where_it_was(tmp_path: Path, taken: bool) -> None:
    async with await anyio.open_process([sys.executable, "-c", _HOST, str(tmp_path / "store")]) as host:
        assert host.stdout is not None
        assert await BufferedByteReceiveStream(host.stdout).receive_until(b"\n", 10) == b"up"
        last = read_endpoint(tmp_path / "store")
        async with await connect(last.url, run="run", name="test", token=last.token) as bus:
            host.kill()
            await host.wait()
            port = int(last.url.rpartition(":")[2])
            with socket.socket() as other:
                if taken:
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    with anyio.fail_after(60):
                        while True:  # until the server has gone with its host
                            try:
                                other.bind(("127.0.0.1", port))
                            except OSError:
                                await anyio.sleep(0.01)
                            else:
                                other.listen()
                                break
                async with EmbeddedServer(tmp_path / "store") as server:
                    assert (server.url == last.url) is not taken
                    assert server.token == last.token
                    if not taken:
                        assert await bus.describe_streams() == []  # by the connection it had


async def test_a_frozen_server_is_stopped(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "store") as server:
        os.kill(server.pid, signal.SIGSTOP)
        pid = server.pid
    assert not alive(pid)


async def test_two_servers_never_share_a_store(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "store") as server:
        with pytest.raises(
            StartupError, match=rf"in use by nats-server {server.pid}, started by process {os.getpid()}"
        ):
            await EmbeddedServer(tmp_path / "store").start()
        async with await connect(server.url, run="run", name="test", token=server.token):
            pass  # the first is untouched
    async with EmbeddedServer(tmp_path / "store"):
        pass


async def test_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"port {port} on 127.0.0.1 is taken"):
            await EmbeddedServer(tmp_path / "store", ServerConfig(port=port)).start()
    async with EmbeddedServer(tmp_path / "store", ServerConfig(port=port)) as server:  # free again, and the store too
        assert server.url.endswith(f":{port}")


async def test_a_missing_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(StartupError, match=re.escape(install_command("server"))):
        find_binary()


async def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho 'the reason' >&2\nexit 3\n")
    script.chmod(0o700)
    with pytest.raises(StartupError, match=r"status 3 .*(?s:.)*the reason"):
        await EmbeddedServer(tmp_path / "store", binary=script).start()


async def test_a_server_that_never_answers(tmp_path: Path) -> None:
    script = tmp_path / "silent"
    script.write_text("#!/bin/sh\necho $$ > " + str(tmp_path / "pid") + "\nexec sleep 60\n")
    script.chmod(0o700)
    with pytest.raises(StartupError, match="did not answer"):
        await EmbeddedServer(tmp_path / "store", ServerConfig(start_timeout_s=5.0), binary=script).start()
    assert not alive(int((tmp_path / "pid").read_text()))


async def test_a_store_that_cannot_be_written() -> None:
    with pytest.raises(StartupError, match="cannot use /proc/none"):
        await EmbeddedServer(Path("/proc/none")).start()


async def test_only_from_the_main_thread(tmp_path: Path) -> None:
    def other() -> str:
        assert threading.current_thread() is not threading.main_thread()
        with pytest.raises(StartupError, match="main thread"):
            anyio.run(EmbeddedServer(tmp_path / "store").start)
        return "refused"

    assert await anyio.to_thread.run_sync(other) == "refused"


async def test_a_server_that_died_is_found_while_it_is_away_and_comes_back_in_its_place(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "store") as server:
        before = read_endpoint(server.store)
        os.kill(server.pid, signal.SIGKILL)
        await server.wait()
        assert read_endpoint(server.store) == before
        await server.start()
        after = read_endpoint(server.store)
    assert (after.url, after.token) == (before.url, before.token)
    assert after.pid != before.pid


async def test_a_server_that_ends_while_it_starts_again_is_started_once_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fail = tmp_path / "fail"
    binary = tmp_path / "nats-server"
    binary.write_text(f'#!/bin/sh\n[ -e {fail} ] && rm {fail} && kill -9 $$\nexec {find_binary()} "$@"\n')
    binary.chmod(0o700)
    async with EmbeddedServer(tmp_path / "store", binary=binary) as server:
        before = server.pid, server.url, server.token
        for _ in range(2):
            fail.touch()
            os.kill(server.pid, signal.SIGKILL)
            await server.wait()
            await server.start_again()
            assert not fail.exists()
        assert server.pid != before[0]
        again = [
            message for message in caplog.messages if message.startswith("nats-server did not start, again in 0.1 s: ")
        ]
        assert len(again) == 2
        assert (server.url, server.token) == before[1:]


@pytest.mark.parametrize("stopped", [False, True])
async def test_the_server_dies_with_its_parent(tmp_path: Path, stopped: bool) -> None:
    program = (
        "import anyio, sys\nfrom pathlib import Path\nfrom lachesis.pipeline.bus.embedded import EmbeddedServer\n"
        "async def main():\n"
        "    async with EmbeddedServer(Path(sys.argv[1])) as server:\n"
        "        print(server.pid, flush=True)\n"
        "        await anyio.sleep(60)\n"
        "anyio.run(main)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, tmp_path / "store"], stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(await anyio.to_thread.run_sync(parent.stdout.readline))
        assert alive(pid)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
        parent.wait()
        with anyio.fail_after(60):
            while alive(pid):  # noqa: ASYNC110
                await anyio.sleep(0.01)
    async with EmbeddedServer(tmp_path / "store"):  # the lock went with it
        pass


async def test_the_token_is_required(nats_server: EmbeddedServer) -> None:
    for token, said in ((None, "wants credentials, and none were given"), ("wrong", "does not take the token given")):
        with pytest.raises(AccessError, match=said) as caught:
            await connect(nats_server.url, run="run", name="test", token=token)
        assert nats_server.token not in str(caught.value)


async def test_budgets_can_be_lowered_below_what_is_reserved(tmp_path: Path) -> None:
    async def start(each_bytes: int) -> int:
        names = ("rollouts", "events", "replay", "teacher", "ledger", "weights")
        streams = StreamsConfig(**{f"{name}_bytes": each_bytes for name in names}, bucket_bytes=8 << 20)
        settings = ServerConfig(max_file_bytes=streams.total_bytes() * 5 // 4)
        async with (
            EmbeddedServer(tmp_path / "store", settings) as server,
            await connect(server.url, token=server.token, run="r", name="t") as bus,
        ):
            await bus.ensure_streams(streams)
            return sum((await bus.reserved_bytes()).values())

    before = await start(64 << 20)
    assert await start(16 << 20) < before
