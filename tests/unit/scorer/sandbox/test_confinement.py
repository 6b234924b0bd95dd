"""What a program in the sandbox can see, open, call and use up."""

import fcntl
import os
import pty
import re
import subprocess
import sys
import uuid
from functools import cache
from pathlib import Path

import anyio
import pytest
from unit.scorer.sandbox.processes import alive, marked

from lachesis.pipeline.scorer.sandbox import Sandbox, SandboxLimits, files
from lachesis.pipeline.scorer.sandbox import sandbox as sandbox_module

pytestmark = pytest.mark.outside
PROCESSES = 16


@cache
def sandbox() -> Sandbox:
    """Return the sandbox of these tests, made by the first that needs it: making one runs a program."""
    limits = SandboxLimits(wall_s=20, cpu_s=10, memory_bytes=512 << 20, processes=PROCESSES)
    return Sandbox(limits, required=("namespaces", "seccomp"), packages=False)


async def output(code: str, text: str = "") -> str | None:
    with anyio.fail_after(120):
        return await sandbox().run(code.encode(), text.encode())


async def test_its_root_holds_the_interpreter_and_nothing_else() -> None:
    listed = await output("import os; print(*sorted(os.listdir('/dev')), *os.listdir('/tmp'), os.getcwd())")
    assert listed == "null stdin /tmp\n"
    seen = (await output("import os; print(*os.listdir('/'), *os.listdir('/etc'))") or "").split()
    kept = {"dev", "empty", "etc", "input", "ld.so.cache", "lib", "lib64", "program.py", "tmp", "usr"}
    assert not set(seen) & {"proc", "sys", "var", "run", "boot", "mnt", "srv", "old", "passwd", "shadow", "hosts"}
    assert {"dev", "tmp", "program.py"} <= set(seen)
    own = {Path(path).parts[1] for path in (os.__file__, Path("/proc/self/exe").resolve())}  # where Python lies
    assert set(seen) <= kept | own | {Path(path).name for path in ("/lib32", "/libx32")}


async def test_it_has_one_writable_folder_of_limited_size() -> None:
    code = """
import os
def tried(what):
    try: what(); return 'did'
    except OSError as error: return type(error).__name__ + str(error.errno)
def fill():
    for n in range(8):
        with open(f'fill{n}', 'wb') as file:
            for _ in range(4): file.write(b'x' * (1 << 20))
def many():
    for n in range(10_000): open(f'many{n}', 'w').close()
paths = ['/x', '/program.py', '/input', '/empty/x', os.__file__, os.path.dirname(os.__file__) + '/site-packages/x']
print(*{tried(lambda: open(path, 'w')) for path in paths if os.path.isdir(os.path.dirname(path))})
print(tried(lambda: os.chmod('/program.py', 0o777)), tried(fill), tried(many))
"""
    assert await output(code) == "OSError30\nOSError30 OSError28 OSError28\n"


async def test_it_inherits_no_open_file() -> None:
    code = """
import os
def is_open(number):
    try: os.fstat(number); return True
    except OSError: return False
print(*filter(is_open, range(64)), open('/dev/stdin').read())
"""
    assert await output(code, "input") == "0 1 2 input\n"


async def test_no_file_grows_beyond_the_size_of_its_folder() -> None:
    code = "import os; f = os.open('a', 66); os.lseek(f, 1 << 40, 0)\ntry: os.write(f, b'x')\nexcept OSError: print(0)"
    assert await output(code) == "0\n"


async def test_it_reaches_no_pipe_terminal_lock_or_device_of_the_machine(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    first, second = pty.openpty()
    devices = ["/dev/tty", "/dev/ptmx", "/dev/zero", "/dev/fuse", "/dev/kmsg", "/dev/shm/x", "/dev/ttyS0", "/dev/vda"]  # noqa: S108
    paths = [str(pipe), os.ttyname(second), *devices]
    code = f"""
import fcntl, os
def tried(path, flags):
    try: os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY); return path
    except OSError: return ''
print(*[tried(path, flags) for path in {paths!r} for flags in (0, 1, 2)])
for lock in (lambda f: fcntl.flock(f, 2), lambda f: fcntl.lockf(f, fcntl.LOCK_SH), lambda f: fcntl.fcntl(f, 1024, 0)):
    for path in ('/dev/null', os.__file__):
        try: lock(open(path)); print(path)
        except OSError: pass
print(os.isatty(1))
"""
    try:
        assert (await output(code) or "").split() == ["False"]
    finally:
        os.close(first)
        os.close(second)
    with Path("/dev/null").open() as null:
        fcntl.flock(null, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was there to be locked


# name: x86_64 number. aarch64 has other numbers, so there this only shows that nothing of it works by another name.
CALLS = {
    "socket": 41, "socketpair": 53, "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "msgget": 68, "semget": 64,
    "mq_open": 240, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_open": 434,
    "pidfd_getfd": 438, "kcmp": 312, "unshare": 272, "setns": 308, "clone3": 435, "mount": 165, "umount2": 166,
    "pivot_root": 155, "chroot": 161, "open_tree": 428, "move_mount": 429, "fsopen": 430, "mount_setattr": 442,
    "bpf": 321, "perf_event_open": 298, "io_uring_setup": 425, "io_setup": 206, "userfaultfd": 323, "keyctl": 250,
    "add_key": 248, "request_key": 249, "mknod": 133, "mknodat": 259, "open_by_handle_at": 304, "fanotify_init": 300,
    "inotify_init1": 294, "syslog": 103, "sync": 162, "syncfs": 306, "flock": 73, "quotactl": 179, "swapon": 167,
    "reboot": 169, "kexec_load": 246, "init_module": 175, "finit_module": 313, "iopl": 172, "ioperm": 173,
    "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "sethostname": 170, "setuid": 105, "setgid": 106,
    "setresuid": 117, "setgroups": 116, "capset": 126, "personality": 135, "seccomp": 317, "landlock_create": 444,
    "setpriority": 141, "sched_setscheduler": 144, "sched_setaffinity": 203, "ioprio_set": 251, "mbind": 237,
    "move_pages": 279, "mlock": 149, "mlockall": 151, "vmsplice": 278, "splice": 275, "tee": 276, "chown": 92,
    "rt_sigqueueinfo": 129, "timer_create": 222, "name_to_handle_at": 303, "acct": 163, "modify_ldt": 154,
    "process_madvise": 440, "epoll_pwait2": 441, "execveat": 322, "x32 read": 0x40000000, "unknown": 1000,
}  # fmt: skip


async def test_every_call_that_is_not_allowed_fails() -> None:
    code = f"""
import ctypes
c = ctypes.CDLL(None, use_errno=True)
for name, number in {CALLS!r}.items():
    ctypes.set_errno(0)
    if c.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 38: print(name, ctypes.get_errno())
print('tried')
"""
    assert await output(code) == "tried\n"


async def test_what_a_call_may_do_is_checked_by_its_arguments() -> None:
    code = """
import ctypes, fcntl, os
c = ctypes.CDLL(None, use_errno=True)
clone = 56 if os.uname().machine == 'x86_64' else 220
for flags in (0x10000000, 0x20000000, 0x40000000, 0x20000, 0x8000000, 0x4000000, 0x2000000):  # CLONE_NEW*
    if c.syscall(clone, flags | 17, 0, 0, 0, 0) != -1: os._exit(1)
print(*[c.prctl(n, 0, 0, 0, 0) for n in (1, 4, 22, 23, 24, 36, 38, 47)])
print(c.prlimit(1, 7, None, (ctypes.c_uint64 * 2)()), c.ioctl(1, 0x5412, b'x'))
print(c.fcntl(0, 1031, 4096), c.fcntl(0, 1024, 0))
"""
    assert await output(code) == "-1 -1 -1 -1 -1 -1 -1 -1\n-1 -1\n-1 -1\n"


NAMESPACES = {"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"}


def is_own_namespace(process: Path, name: str) -> bool:
    """Return whether a process is in another namespace of this kind than this one."""
    return (process / "ns" / name).readlink() != Path("/proc/self/ns", name).readlink()


async def test_it_runs_without_rights_as_nobody_special() -> None:
    mark, texts = uuid.uuid4().hex, []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox().run, marked("import time; time.sleep(99)", mark), b"")
        with anyio.fail_after(60):
            while not texts:
                await anyio.sleep(0.01)
                for folder in (Path(f"/proc/{pid}") for pid in alive(mark)):
                    if folder.joinpath("cmdline").read_bytes().endswith(b"\0/program.py\0"):  # not the init
                        texts = [folder.joinpath("status").read_text()]
                        own = {name for name in NAMESPACES if is_own_namespace(folder, name)}
        tasks.cancel_scope.cancel()
    assert own == NAMESPACES
    status = dict(line.split(":\t", 1) for line in texts[0].splitlines() if ":\t" in line)
    assert status["Seccomp"] == "2"
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    assert "0" not in status["Uid"].split() + status["Gid"].split()


async def test_the_number_of_processes_is_limited() -> None:
    code = """
import os, time
n = 0
try:
    while n < 300:
        if not os.fork(): time.sleep(60)
        n += 1
except BlockingIOError: print(n)
"""
    forked = await output(code)
    assert forked is not None
    assert 1 <= int(forked) <= PROCESSES


async def test_output_is_limited() -> None:
    assert await output("print('x' * 65_000)") == "x" * 65_000 + "\n"
    assert await output("print('x' * 66_000)") is None


async def test_the_number_of_open_files_is_limited() -> None:
    code = """
kept = []
try:
    while len(kept) < 500: kept.append(open('/dev/null'))
except OSError as error: print(error.errno, len(kept) <= 64)
"""
    assert await output(code) == "24 True\n"


@pytest.mark.slow
async def test_memory_is_limited_whatever_it_is_called() -> None:
    hidden = """
import mmap, os
def shared():
    for _ in range(8): kept.append(mmap.mmap(-1, 128 << 20)); kept[-1][:: 4096] = bytes(len(kept[-1][::4096]))
def disk():
    for n in range(80):
        with open(f'f{n}', 'wb') as file: file.write(b'x' * (15 << 20))
def nameless():
    f = os.memfd_create('x')
    for _ in range(1500): os.write(f, b'x' * (1 << 20))
kept = []
for what in (shared, disk, nameless):
    try: what(); print(what)
    except OSError: pass
    except MemoryError: pass
print('limited')
"""
    assert await output(hidden) == "limited\n"


@pytest.mark.slow
async def test_processes_share_one_limit_of_memory() -> None:
    if "cgroups" in sandbox().missing:
        pytest.skip(f"no control groups: {sandbox().missing['cgroups']}")
    code = """
import os, select, signal, time
r, w = os.pipe()
children = []
for _ in range(4):
    children.append(os.fork())
    if children[-1] == 0:
        x = bytearray(b'x') * (300 << 20)
        os.write(w, b'1')
        signal.pause()
    while os.waitid(os.P_PID, children[-1], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if select.select([r], [], [], 0.01)[0]:
            os.read(r, 1)
            break
deadline = time.monotonic() + 9
while len(children) > 1 and time.monotonic() < deadline:  # until the kernel has ended those that are too many
    children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
print(len(children))
"""
    assert await output(code) in {"0\n", "1\n", None}  # None: version 2 of control groups ends all of it at once


async def test_it_crashes_without_the_machines_core_dump_handler() -> None:
    limits = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"
    assert await output(limits) == "(1, 1)\n"


def installed(package: str) -> bool:
    """Return whether this interpreter finds the package of itself: the folders of PYTHONPATH are not for programs."""
    done = subprocess.run([sys.executable, "-I", "-c", f"import {package}"], stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0


async def test_installed_packages_are_there_if_asked_for_alone() -> None:
    code = b"try:\n    import msgspec; print('there')\nexcept ImportError: print('none')"
    assert await sandbox().run(code, b"") == "none\n"
    with_packages = Sandbox(sandbox()._limits, required=("namespaces", "seccomp"), packages=True)
    assert await with_packages.run(code, b"") == ("there\n" if installed("msgspec") else "none\n")


async def test_numpy_computes_and_starts_no_thread_for_each_core() -> None:
    if not installed("numpy"):
        pytest.skip("this interpreter has no numpy of its own")
    code = b"import numpy; print(int(numpy.ones((9, 9)).dot(numpy.ones(9)).sum()))"
    with_packages = Sandbox(sandbox()._limits, required=("namespaces", "seccomp"), packages=True)
    assert await with_packages.run(code, b"") == "81\n"
    shown = b"import os; print(*(os.environ[name] for name in ('OPENBLAS_NUM_THREADS', 'OMP_NUM_THREADS')))"
    assert await with_packages.run(shown, b"") == "1 1\n"


def test_packages_of_an_environment_that_this_one_builds_upon_are_readable(tmp_path, monkeypatch) -> None:
    own, base, source = (tmp_path / name for name in ("own/site-packages", "base/site-packages", "project/src"))
    for folder in (own, base, source):
        folder.mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '%s\\n' {own} {base} {source}\n")
    python.chmod(0o755)
    monkeypatch.setattr(files.sys, "executable", str(python))
    monkeypatch.setattr(files, "_library_folders", lambda _: [])
    readable = files.interpreter_files(packages=True).readable
    assert {str(own), str(base)} <= set(readable)
    assert str(source) not in readable


async def test_what_programs_need_works() -> None:
    code = """
import collections, concurrent.futures, decimal, hashlib, heapq, itertools, json, math, random, re, statistics
import sqlite3, subprocess, sys, tempfile, threading, time, zlib
with tempfile.TemporaryFile() as file: file.write(b'x')
with concurrent.futures.ThreadPoolExecutor(4) as pool: assert sum(pool.map(int, '1234')) == 10
assert subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True, text=True).stdout == '7\\n'
sqlite3.connect(':memory:').execute('create table t (a)')
random.random(); time.sleep(0.01); hashlib.md5(b'').hexdigest(); decimal.Decimal(1) / 3
print(sum(map(int, sys.stdin)), 'é')
exit()
"""
    assert await output(code, "1\n2\n3\n") == "6 é\n"


async def test_verdicts_leave_nothing_behind() -> None:
    await output("print(1)")
    files, mounted, before = len(list(Path("/proc/self/fd").iterdir())), mounts(), groups()
    for _ in range(3):
        await output("print(1)")
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert mounts() == mounted
    assert {path for path in groups() - before if not Path("/proc", path.name[9:]).exists()} == set()  # others run too


def mounts() -> list[str]:
    """Return what is mounted, but for the small disks of other tests, which may come and go meanwhile."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "/pytest-of-" not in line]


def groups() -> set[Path]:
    return {path for folder, _ in sandbox()._groups for path in Path(folder).glob("lachesis-[0-9]*")}


def test_no_part_of_an_answer_is_on_a_command_line() -> None:
    assert not re.search("PROGRAM|INPUT", " ".join(sandbox()._command("", b"PROGRAM", b"INPUT", 1.0)))


def test_the_launcher_ends_a_program_at_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scorer may be frozen, and then neither ends it nor closes its input."""
    monkeypatch.setattr(sandbox_module, "_LAUNCH_S", 0.0)
    made = object.__new__(Sandbox)
    vars(made).update(vars(sandbox()) | {"_limits": SandboxLimits(2, 10, 512 << 20, PROCESSES)})
    program = b"import os, time\nfor _ in range(3): os.fork()\ntime.sleep(600)"
    with made._folder() as folder:
        command = made._command(folder, program, b"", 10)
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as process:
            assert process.stdin is not None
            process.stdin.write(made._filter + program)
            process.stdin.flush()
            try:
                assert process.wait(120) != 0
                assert process.stdout is not None
                assert process.stdout.read() == b"", "nothing of the program holds its output open"
            finally:
                process.kill()
