"""vLLM does not outlive the service that started it, even if it will not end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio

STUBBORN = """
import os, signal, subprocess, sys, time
from lachesis.pipeline.inference.engines.vllm.parent_watch import end_with_owner
signal.signal(signal.SIGTERM, lambda *_: None)
engine = subprocess.Popen(["sleep", "300"])
end_with_owner(0.2)
assert "LACHESIS_VLLM_OWNER" not in os.environ
open(sys.argv[1], "w").write(f"{os.getpid()} {engine.pid}")
time.sleep(300)
"""
SERVICE = """
import os, subprocess, sys, time
environ = os.environ | {"LACHESIS_VLLM_OWNER": sys.argv[3] if len(sys.argv) > 3 else str(os.getpid())}
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], start_new_session=True, env=environ)
time.sleep(300)
"""


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and " Z " not in stat.read_text()


async def _started(tmp_path: Path, *owner: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    said = tmp_path / "pids"
    service = subprocess.Popen([sys.executable, "-c", SERVICE, STUBBORN, str(said), *owner])  # noqa: ASYNC220
    with anyio.fail_after(60):
        while not said.exists() or not said.read_text():  # noqa: ASYNC110
            await anyio.sleep(0.01)
    return service, [int(pid) for pid in said.read_text().split()]


async def test_a_killed_service_takes_a_server_that_will_not_end_and_its_engine_with_it(tmp_path: Path) -> None:
    service, pids = await _started(tmp_path)
    assert all(map(_runs, pids))
    service.kill()
    service.wait()
    with anyio.fail_after(60):
        while any(map(_runs, pids)):  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_a_process_that_another_one_started_is_left_alone(tmp_path: Path) -> None:
    service, pids = await _started(tmp_path, str(os.getpid()))
    service.kill()
    service.wait()
    await anyio.sleep(0.5)
    assert all(map(_runs, pids))
    os.killpg(pids[0], signal.SIGKILL)
