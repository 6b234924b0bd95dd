"""What the machine does not grant is said at the start; nothing runs without it unless the configuration says so."""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import pytest

from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.scorer.raters.code import CodeRater
from lachesis.pipeline.scorer.sandbox import Sandbox, SandboxLimits, sandbox
from lachesis.pipeline.scorer.sandbox.root import can_become
from lachesis.schemas.errors import ConfigError

pytestmark = pytest.mark.outside
ROOT = Path(__file__).parents[4]
LIMITS = SandboxLimits(wall_s=5, cpu_s=5, memory_bytes=256 << 20, processes=16)


def test_a_missing_protection_that_is_required_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "build_filter", lambda *_, **__: None)
    with pytest.raises(StartupError, match=r"no seccomp \(no list of system calls for .*`required`"):
        CodeRater()


def test_it_runs_without_what_is_not_required_and_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sandbox, "find_groups", lambda *_: "none here")
    with caplog.at_level(logging.WARNING, "lachesis"):
        made = Sandbox(LIMITS, required=("namespaces", "seccomp"), packages=False)
    assert made.missing == {"cgroups": "none here"}
    assert "no cgroups (none here): without them memory is summed" in caplog.text
    with pytest.raises(StartupError, match=r"no cgroups \(none here\)"):
        Sandbox(LIMITS, required=("cgroups",), packages=False)


def test_groups_that_cannot_be_used_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "find_groups", lambda *_: [(str(tmp_path), {"memory.max": "1"})])
    made = Sandbox(LIMITS, required=("namespaces", "seccomp"), packages=False)
    assert "memory.max" in made.missing["cgroups"]


def test_an_unknown_protection_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown protection prayers; there are namespaces, landlock"):
        CodeRater(required=["prayers"])


WITHOUT_NAMESPACES = """
import ctypes, os, struct, sys, threading
libc = ctypes.CDLL(None)
unshare = {"x86_64": 272, "aarch64": 97}[os.uname().machine]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, unshare), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps), 32)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", 4, ctypes.addressof(code)), 0, 0) == 0
import anyio
from lachesis.pipeline.scorer.sandbox import SandboxLimits, Sandbox
limits = SandboxLimits(wall_s=10, cpu_s=5, memory_bytes=256 << 20, processes=16)
sandbox = Sandbox(limits, required=("seccomp", "landlock"), packages=False)
assert "namespaces" in sandbox.missing, sandbox.missing
for _ in range(20):  # as many processes as its user may have others
    threading.Thread(target=threading.Event().wait, daemon=True).start()
victim = sys.argv[1]
async def main():
    print(await sandbox.run(f'''
import os, threading
def tried(what, *arguments):
    try: what(*arguments); return "did"
    except OSError as error: return type(error).__name__
victim = {victim!r}
print(tried(open, victim), tried(open, victim, "w"), tried(os.remove, victim), tried(os.chmod, victim, 0))
print(tried(os.fork), tried(os.kill, {os.getpid()}, 9), tried(os.setsid), tried(open, "/program", "w"))
threading.Thread(target=print, args=["thread"]).start()
open("own", "w").write("x"); print(open("own").read(), os.getuid(), os.getpid())
'''.encode(), b""), end="")
anyio.run(main)
"""


def test_without_namespaces_one_process_runs_that_reaches_no_file(tmp_path: Path) -> None:
    if os.getuid() == 0 and not readable_by_all(Path(sys.executable)):
        pytest.skip("nobody may start root's interpreter; run by an ordinary user below")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    command = [sys.executable, "-c", WITHOUT_NAMESPACES, str(victim)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, *thread, last = done.stdout.splitlines()
    assert first == "PermissionError PermissionError PermissionError OSError"
    assert second == "PermissionError OSError OSError PermissionError"
    assert thread == ["thread"]
    own, uid, pid = last.split()
    assert own == "x"
    assert uid != "0"
    assert not Path("/proc", pid).exists()


def readable_by_all(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in path.resolve().parents)


@pytest.mark.slow
def test_all_of_it_holds_for_an_ordinary_user_too() -> None:
    """Run the tests of this folder again as a user without rights, by an interpreter that it may start."""
    if os.getuid() != 0:
        pytest.skip("this is an ordinary user already")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = next((path for path in (sys.executable, f"/usr/bin/{version}") if startable(path)), None)
    spec = importlib.util.find_spec("msgspec")
    assert spec is not None
    assert spec.origin is not None
    packages = Path(spec.origin).parents[1]
    setpriv = shutil.which("setpriv")
    if python is None or setpriv is None or not readable_by_all(packages / "x") or not readable_by_all(ROOT / "x"):
        pytest.skip(f"an ordinary user can start no {version} here, or not read {ROOT}")
    drop = [setpriv, "--reuid=1000", "--regid=1000", "--clear-groups"]
    with tempfile.TemporaryDirectory() as own:  # pytest's own folders are open to root only
        os.chown(own, 1000, 1000)
        flags = [
            "-m",
            "not slow",
            "-n0",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--rootdir={ROOT}",
            f"--basetemp={own}/tests",
        ]
        done = subprocess.run(
            [*drop, python, "-m", "pytest", str(Path(__file__).parent), *flags],
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": f"{ROOT / 'src'}:{packages}",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout


def startable(path: str) -> bool:
    return Path(path).exists() and readable_by_all(Path(path))


AS_ROOT = """
import os, anyio
from lachesis.pipeline.scorer.sandbox import SandboxLimits, Sandbox, sandbox
assert os.getuid() == 0
limits = SandboxLimits(wall_s=10, cpu_s=5, memory_bytes=256 << 20, processes=16)
made = Sandbox(limits, required=("namespaces", "seccomp"), packages=False)
program = b"import os; print(os.getuid(), os.getgid(), os.path.exists('/proc'), os.path.exists('/root/.bashrc'))"
print(anyio.run(made.run, program, b""), end="")
"""


@pytest.mark.parametrize(
    "container",
    [
        ["unshare", "--map-root-user"],  # as rootless enroot and apptainer have it: there is no user but root
        ["setpriv", "--bounding-set=-setuid,-setgid", "--inh-caps=-setuid,-setgid"],
        ["setpriv", "--bounding-set=-chown", "--inh-caps=-chown"],
    ],
)
def test_a_root_that_cannot_become_nobody_is_nobody_in_a_namespace(container: list[str]) -> None:
    if shutil.which(container[0]) is None or os.getuid() != 0:  # an ordinary user's interpreter need not be the root's
        pytest.skip("needs root, and unshare and setpriv")
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{' '.join(container)} is not possible here")
    done = subprocess.run([*container, sys.executable, "-c", AS_ROOT], capture_output=True, text=True, check=False)
    assert done.stdout == "65534 65534 False False\n", done.stderr


WITHOUT_ANY = """
import ctypes, os, struct
libc = ctypes.CDLL(None)
unshare, landlock = {"x86_64": (272, 444), "aarch64": (97, 444)}[os.uname().machine]
steps = [(0x20, 0, 0, 0), (0x15, 1, 0, unshare), (0x15, 0, 1, landlock), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps), 40)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", 5, ctypes.addressof(code)), 0, 0) == 0
from lachesis.pipeline.scorer.sandbox import SandboxLimits, Sandbox
limits = SandboxLimits(wall_s=10, cpu_s=5, memory_bytes=256 << 20, processes=16)
Sandbox(limits, required=(), packages=False)
"""


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv")
def test_it_does_not_run_as_root_that_nothing_confines() -> None:
    drop = ["setpriv", "--bounding-set=-setuid,-setgid", "--inh-caps=-setuid,-setgid"]
    done = subprocess.run([*drop, sys.executable, "-c", WITHOUT_ANY], capture_output=True, text=True, check=False)
    assert (
        "StartupError: untrusted code cannot be run here: [Errno 1] root cannot change to the user nobody here"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("changed", "can"),
    [
        ({}, True),
        ({"uid_map": "0 1000 1\n1 100000 65536\n", "gid_map": "0 1000 1\n1 100000 65536\n"}, True),
        ({"uid_map": "0 1000 1\n"}, False),
        ({"gid_map": "0 1000 1\n1 100000 999\n"}, False),
        ({"setgroups": "deny\n"}, False),
        ({"status": "Uid: 0\nCapEff:\t0000000000000000\n"}, False),
        ({"status": "Uid: 0\nCapEff:\t00000000a80425fb\n"}, True),  # Docker's
    ],
)
def test_whether_root_can_become_nobody(tmp_path: Path, monkeypatch, changed: dict[str, str], can: bool) -> None:
    whole = "0 0 4294967295\n"
    status = "Uid: 0\nCapEff:\t000001ffffffffff\n"
    files = {"uid_map": whole, "gid_map": whole, "setgroups": "allow\n", "status": status} | changed
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert can_become(65534, proc=tmp_path) is can
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert not can_become(65534, proc=tmp_path)


async def test_an_outage_of_the_sandbox_is_no_rating(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Sandbox(LIMITS, required=("namespaces", "seccomp"), packages=False)
    broken = tmp_path / "launcher.py"
    broken.write_text("import os, sys; sys.stdin.buffer.read(1); os.write(2, b'namespaces: none left')")
    monkeypatch.setattr(sandbox, "_LAUNCHER", broken)
    with anyio.fail_after(60), pytest.raises(sandbox.InfrastructureError, match="set up: namespaces: none left"):
        await made.run(b"print(1)", b"")
    broken.write_text("import os; os.kill(os.getpid(), 9)")
    with anyio.fail_after(60), pytest.raises(sandbox.InfrastructureError, match="its launcher was killed by signal 9"):
        await made.run(b"print(1)", b"")
