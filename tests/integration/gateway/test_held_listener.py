"""A killed gateway under `lachesis up`: its clients wait for the next one, and are refused nothing."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import anyio
import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
CONFIG = """
run = "held"
mode = "observe"
inference.policy.url = "http://127.0.0.1:9"
services.drain_s = 2.0
[environments.words]
kind = "gateway"
[gateway]
port = 0
needs_token = false
"""


async def test_a_client_waits_for_the_next_gateway_on_the_same_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "run.toml").write_text(CONFIG)
    run = tmp_path / "runs" / "held"
    with (tmp_path / "up.log").open("wb") as sink:
        up = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lachesis", "up", "--config", "run.toml",
            cwd=tmp_path, stdin=asyncio.subprocess.DEVNULL, stdout=sink, stderr=sink,
        )  # fmt: skip
    try:
        with anyio.fail_after(150):
            while b"processes are ready" not in (tmp_path / "up.log").read_bytes():
                assert up.returncode is None, (tmp_path / "up.log").read_text()
                await anyio.sleep(0.1)
        log = (run / "logs" / "gateway.log").read_text()
        url = log.partition("listening on ")[2].split()[0]
        async with httpx.AsyncClient(base_url=url, timeout=90, trust_env=False) as http:
            assert (await http.get("/")).status_code == 200
        first = json.loads((run / "pids.json").read_bytes())["gateway"]
        for _ in range(2):
            os.kill(json.loads((run / "pids.json").read_bytes())["gateway"], signal.SIGKILL)
            async with httpx.AsyncClient(base_url=url, timeout=90, trust_env=False) as http:
                answer = await http.get("/")  # one request: nothing here tries again
            assert answer.json() == {"message": "AtroposLib API"}
        assert json.loads((run / "pids.json").read_bytes())["gateway"] != first
        up.send_signal(signal.SIGTERM)
        with anyio.fail_after(90):
            assert await up.wait() == 0
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            with pytest.raises(httpx.ConnectError):
                await http.get("/")
    finally:
        if up.returncode is None:
            up.terminate()
            with anyio.move_on_after(60):
                await up.wait()
