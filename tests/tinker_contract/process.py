"""The contract server as a process of its own, which can be killed and come back at the same port."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import httpx

KEY = "tml-of-a-test"


class ContractServer:
    def __init__(self, folder, model):
        self.folder, self.model = folder, model
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def start(self):
        arguments = [str(self.folder), str(self.model), str(self.port), KEY]
        tests = Path(__file__).parents[1]
        self.process = await anyio.open_process(
            [sys.executable, "-m", "tinker_contract.server", *arguments],
            env=os.environ | {"PYTHONPATH": str(tests)}, stdin=subprocess.DEVNULL, stdout=None, stderr=None,
        )  # fmt: skip
        with anyio.fail_after(600):
            async with httpx.AsyncClient() as client:
                while True:
                    try:
                        await client.post(f"{self.url}/api/v1/client/config", json={})
                    except httpx.TransportError:
                        assert self.process.returncode is None
                        await anyio.sleep(0.05)
                    else:
                        return

    async def kill(self):
        self.process.send_signal(signal.SIGKILL)
        await self.process.aclose()

    def requests(self, kind):
        lines = (self.folder / "requests.jsonl").read_text().splitlines()
        return [found for found in map(json.loads, lines) if found["request"] == kind]
