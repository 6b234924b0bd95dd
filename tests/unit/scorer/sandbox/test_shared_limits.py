"""Processor time and memory are limited for all processes of a program together, however they are started."""

from pathlib import Path

import anyio
import pytest

from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.scorer.raters.code import CodeRater
from lachesis.pipeline.scorer.sandbox import Sandbox, SandboxLimits
from lachesis.pipeline.scorer.sandbox import sandbox as sandbox_module

pytestmark = pytest.mark.outside
CPU_S = 0.5
LIMITS = SandboxLimits(wall_s=30, cpu_s=CPU_S, memory_bytes=256 << 20, processes=16)
SLACK_S = 1.0
"""Processor time of launcher and init, and what runs until the next look."""
BURN = """
import os, signal, time
def burn(cpu_s):
    end = time.process_time() + cpu_s
    while time.process_time() < end: pass
"""
WAYS = {
    "at once": """
for _ in range(8):
    if not os.fork(): burn(0.9); os._exit(0)
for _ in range(8): os.wait()
""",
    "orphans": """
for _ in range(30):
    if not os.fork():
        if not os.fork(): burn(0.3)
        os._exit(0)
    os.wait()
while True: time.sleep(1)
""",
    "never waited for": """
for _ in range(12):
    if not os.fork(): burn(0.5); os._exit(0)
time.sleep(25)
""",
    "ignored": """
try: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
except OSError: pass
for _ in range(600):
    try:
        if not os.fork(): burn(0.005); os._exit(0)
        time.sleep(0.005)
    except BlockingIOError:
        os.wait()
""",
}


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    """Return a sandbox without control groups, which would do a part of this by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox_module, "find_groups", lambda *_: "none here")
        return Sandbox(LIMITS, required=("namespaces", "seccomp"), packages=False)


@pytest.mark.parametrize("way", WAYS)
async def test_processes_share_the_processor_time(sandbox: Sandbox, way: str) -> None:
    with anyio.fail_after(60):
        output, used_s = await sandbox.run_within(f"{BURN}\n{WAYS[way]}\nprint('done')".encode(), b"", CPU_S)
    assert output is None
    assert CPU_S <= used_s < CPU_S + SLACK_S


async def test_a_program_that_stays_below_it_is_left_alone(sandbox: Sandbox) -> None:
    code = f"{BURN}\nfor _ in range(4):\n    if not os.fork(): burn(0.05); os._exit(0)\n    os.wait()\nprint('done')"
    output, used_s = await sandbox.run_within(code.encode(), b"", CPU_S)
    assert output == "done\n"
    assert 0.2 <= used_s < CPU_S


FORKS = """
import os, time
made = 0
try:
    while made < 100:
        if not os.fork(): time.sleep(20)
        made += 1
except BlockingIOError: print(1 <= made <= 16)
"""


async def test_the_kernel_refuses_processes_beyond_their_number(sandbox: Sandbox) -> None:
    with anyio.fail_after(60):
        assert await sandbox.run(FORKS.encode(), b"") == "True\n"


async def test_a_program_of_too_many_processes_ends_where_the_kernel_refuses_none(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launcher = sandbox_module._LAUNCHER.read_text()
    unlimited = launcher.replace("(resource.RLIMIT_NPROC, settings.processes)", "(resource.RLIMIT_NPROC, 4096)")
    assert unlimited != launcher
    (tmp_path / "launcher.py").write_text(unlimited)
    monkeypatch.setattr(sandbox_module, "_LAUNCHER", tmp_path / "launcher.py")
    with anyio.fail_after(60):
        assert await sandbox.run(f"{FORKS}\ntime.sleep(20)\nprint('done')".encode(), b"") is None


async def test_processes_share_the_memory(sandbox: Sandbox) -> None:
    code = """
import os, time
for _ in range(6):
    if not os.fork():
        kept = [bytearray(b'x') * (1 << 20) for _ in range(100) if not time.sleep(0.002)]
        time.sleep(20)
time.sleep(20)
print('done')
"""
    with anyio.fail_after(60):
        output, _ = await sandbox.run_within(code.encode(), b"", CPU_S)
    assert output is None


async def test_pages_that_processes_share_count_once(sandbox: Sandbox) -> None:
    code = """
import os, time
kept = bytearray(b'x') * (100 << 20)
for _ in range(4):
    if not os.fork(): time.sleep(0.3); os._exit(0)
for _ in range(4): os.wait()
print('done')
"""
    assert (await sandbox.run_within(code.encode(), b"", CPU_S))[0] == "done\n"


@pytest.mark.slow
async def test_all_tests_of_an_answer_share_its_time() -> None:
    rater = CodeRater(time_s=2, total_s=1)
    forks = "for _ in range(4):\n    if not os.fork(): burn(0.1); os._exit(0)\nfor _ in range(4): os.wait()"
    code = f"```python\n{BURN}\n{forks}\nprint(1)\n```"
    tests = [{"input": "", "output": "1"}] * 8
    rating = await rater.rate(Sample(prompt="", completion=code, task={"tests": tests}))
    assert rating is not None
    assert rating < 0.5
