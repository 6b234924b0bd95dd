"""Nothing of a rated program is alive after its verdict, whatever it did to live on."""

import os
import signal
import subprocess
import sys
import uuid
from functools import cache
from pathlib import Path

import anyio
import pytest
from unit.scorer.sandbox.processes import alive, marked

from lachesis.pipeline.scorer.sandbox import Sandbox, SandboxLimits

pytestmark = pytest.mark.outside
WALL_S = 1.5
C = "import ctypes, os, signal, sys, time\nc = ctypes.CDLL(None)\n"
STAY = "\nwhile True: time.sleep(0.05)\n"
IN_CHILD = "\nif os.fork():\n    print('done', flush=True); os._exit(0)\n"

ESCAPES = {
    "no signal at its parent's death, a session of its own": C + "c.prctl(1, 0); os.setsid()" + STAY,
    "a child that outlives a right answer": C + IN_CHILD + STAY,
    "a daemon by two forks": C + IN_CHILD + "os.setsid()\nif os.fork(): os._exit(0)\nos.chdir('/')" + STAY,
    "a daemon that has closed every file": C + IN_CHILD + "os.setsid(); os.closerange(0, 64)" + STAY,
    "every signal ignored": C + "for s in set(signal.valid_signals()) - {9, 19}: signal.signal(s, 1)" + STAY,
    "forks without end": C + "while True:\n    try: os.fork()\n    except OSError: pass",
    "a chain of children, each of which outlives its parent": C
    + "while True:\n    if os.fork(): os._exit(0)\n    os.setsid()",
    "another interpreter": C + "os.execv(sys.executable, [sys.executable, '-I', '-c', 'while True: pass'])",
    "another interpreter, started in a new session": C
    + "import subprocess; subprocess.Popen([sys.executable, '-c', 'while True: pass'], start_new_session=True)",
    "its init killed": C + "os.kill(1, 9); os.kill(1, 15); os.kill(1, 2); os.kill(1, 6)" + STAY,
    "its init stopped": C + IN_CHILD + "os.kill(1, 19); os.kill(1, 20)" + STAY,
    "every process signalled": C + "signal.signal(15, 1); os.kill(-1, 15)" + STAY,
    "a process namespace of its own": C + "c.unshare(0x30000000)" + IN_CHILD + STAY,
    "a process namespace by clone": C + "c.syscall(56, 0x30000011, 0, 0, 0, 0)" + STAY,
    "a process namespace by clone3": C
    + "a = (ctypes.c_uint64 * 11)(0x30000000, 0, 0, 0, 17); c.syscall(435, a, 88)" + IN_CHILD + STAY,
    "a child that shares its init's parent": C + "c.syscall(56, 0x8011, 0, 0, 0, 0)" + STAY,
    "output that nobody reads": C + "os.fork()\nwhile True: os.write(1, b'x' * 65536)",
    "its output closed": C + "os.closerange(0, 3)" + STAY,
    "itself stopped": C + "os.kill(os.getpid(), 19)",
    "a stopped child": C + IN_CHILD + "os.kill(os.getpid(), 19)",
    "its first thread ended, another goes on": C
    + "import threading; threading.Thread(target=lambda: time.sleep(99)).start(); c.syscall(60, 0)",
    "its processor time used up without dying of it": C + "signal.signal(24, 1)\nwhile True: pass",
    "a crash with a child behind": C + "if os.fork(): ctypes.string_at(0)" + STAY,
    "memory that is slow to free": C + "x = bytearray(200 << 20); os.fork()" + STAY,
    "the way to its init: tracing, its memory, its limits": C
    + "c.ptrace(16, 1, 0, 0); c.syscall(311, 1, 0, 0, 0, 0, 0); c.prlimit(1, 0, (ctypes.c_uint64 * 2)(), 0)" + STAY,
    "the machine's own processes mounted": C
    + "os.mkdir('p'); print(c.mount(b'proc', b'p', b'proc', 0, 0)); c.chroot(b'p')" + IN_CHILD + STAY,
    "a program of its own written and started": C
    + "open('a', 'w').write('#!' + sys.executable + '\\nwhile 1: pass'); os.chmod('a', 0o755); os.execv('./a', ['a'])",
}  # fmt: skip


@cache
def sandbox() -> Sandbox:
    """Return the sandbox of these tests, made by the first that needs it: making one runs a program."""
    limits = SandboxLimits(wall_s=WALL_S, cpu_s=5, memory_bytes=256 << 20, processes=16)
    return Sandbox(limits, required=("namespaces", "seccomp"), packages=False)


async def escape(code: str) -> tuple[str | None, list[int]]:
    """Return a program's output, and what is alive of it at the moment of its verdict."""
    mark, output = uuid.uuid4().hex, None
    with anyio.move_on_after(WALL_S):
        output = await sandbox().run(marked(code, mark), b"")
    return output, alive(mark)


@pytest.mark.slow
async def test_nothing_is_alive_after_the_verdict() -> None:
    survivors, outputs = {}, {}
    limiter = anyio.CapacityLimiter(6)

    async def attempt(name: str) -> None:
        async with limiter:
            outputs[name], survivors[name] = await escape(ESCAPES[name])

    async with anyio.create_task_group() as tasks:
        for name in ESCAPES:
            tasks.start_soon(attempt, name)
    assert len(survivors) >= 20
    assert {name: pids for name, pids in survivors.items() if pids} == {}
    assert outputs["a child that outlives a right answer"] in {"done\n", None}  # None: on a machine that is too busy


async def test_what_is_alive_before_the_verdict_is_found() -> None:
    mark = uuid.uuid4().hex
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox().run, marked("import os, time; os.setsid(); time.sleep(99)", mark), b"")
        with anyio.fail_after(30):
            while not alive(mark):
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    assert not alive(mark)


SCORER = """
import sys, anyio
from lachesis.pipeline.scorer.sandbox import SandboxLimits, Sandbox
limits = SandboxLimits(wall_s=60, cpu_s=60, memory_bytes=256 << 20, processes=16)
sandbox = Sandbox(limits, required=("namespaces", "seccomp"), packages=False)
anyio.run(sandbox.run, sys.argv[1].encode(), b"")
"""


@pytest.mark.parametrize("victim", ["the scorer", "the launcher"])
async def test_a_program_dies_with_whoever_watches_over_it(victim: str) -> None:
    mark = uuid.uuid4().hex
    code = marked("import os, time\nos.setsid(); os.fork()\nwhile True: time.sleep(0.05)", mark).decode()
    with subprocess.Popen([sys.executable, "-c", SCORER, code], stderr=subprocess.DEVNULL) as scorer:
        with anyio.fail_after(60):
            while len(alive(mark)) < 2:
                await anyio.sleep(0.01)
        victims = [scorer.pid] if victim == "the scorer" else children(scorer.pid)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(60):
            while alive(mark):
                await anyio.sleep(0.01)
        scorer.wait()
        assert victims


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
