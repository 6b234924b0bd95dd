"""Untrusted code, run for real in the sandbox."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from lachesis.pipeline.scorer.config import RaterConfig
from lachesis.pipeline.scorer.loader import load_member
from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.scorer.raters.code import CodeRater
from lachesis.schemas.errors import ConfigError, DataError

pytestmark = pytest.mark.outside


@cache
def patient() -> CodeRater:
    """Return a rater whose limits no program reaches, made by the first test that needs it: it runs a program then."""
    return CodeRater(time_s=60, total_s=120, memory_mb=256)


@cache
def hasty() -> CodeRater:
    """Return a rater for programs that reach its limits; on a busy machine, any other may as well."""
    return CodeRater(time_s=1, total_s=2, memory_mb=256)


def answer(code: str, *tests: dict[str, str]) -> Sample:
    return Sample(prompt="", completion=f"Here:\n```python\n{code}\n```\nDone.", task={"tests": list(tests)})


async def rated(code: str, *tests: dict[str, str], rater: Callable[[], CodeRater] = patient) -> float | None:
    return await rater().rate(answer(code, *tests))


async def test_the_share_of_passed_tests_is_the_rating() -> None:
    double = "print(int(input()) * 2)"
    assert await rated(double, {"input": "4", "output": "8"}, {"input": "5", "output": "10\n"}) == 1.0
    assert await rated(double, {"input": "4", "output": "8"}, {"input": "4", "output": "9"}) == 0.5
    assert await rated("def f(x): return x + 1", {"assert": "assert f(1) == 2"}, {"assert": "assert f(1) == 3"}) == 0.5


async def test_without_tests_it_abstains_and_without_code_it_is_zero() -> None:
    assert await patient().rate(Sample(prompt="", completion="x", task={})) is None
    assert await patient().rate(Sample(prompt="", completion="x", task={"tests": [{"output": ""}]})) == 0.0


async def test_a_malformed_test_is_the_tasks_fault() -> None:
    with pytest.raises(DataError, match="a test of code has"):
        await rated("print(1)", {"expected": "1"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = 'a' * (1 << 30); print('ok')",
        "import os\nwhile True: os.fork()",
        "while True: print('y' * 4096)",
        "raise SystemExit(3)",
        "import os; os._exit(0)",
        "1 / 0",
    ],
)
async def test_what_takes_too_much_or_fails_has_failed(code: str) -> None:
    assert await rated(code, {"assert": "print('ok')"}, rater=hasty) == 0.0


async def test_it_cannot_reach_a_server_on_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1); print('in')"
        assert await rated(code, {"output": "in"}) == 0.0
        assert await rated(code.replace("socket.create_connection", "print"), {"output": "in"}) == 0.0
        reached = threading.Event()
        with socket.create_connection(("127.0.0.1", port), 1):  # the server was there to be reached
            reached.set()
        assert reached.is_set()


async def test_no_socket_file_leads_out_of_it(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        server.settimeout(0.1)
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({path!r}); s.send(b'escaped'); print('in')"
        assert await rated(code, {"output": "in"}) == 0.0
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(97)",
        "print('a\0b')",
        "x = '" + "\N{SNAKE}" * 40_000 + "'",
        "print('\ud800')",
        "import os; os.close(1)",
    ],
)
async def test_no_answer_can_make_its_own_rating_missing(code: str) -> None:
    assert await rated(code, {"output": "never"}) == 0.0


async def test_tests_that_come_after_the_time_is_up_have_failed() -> None:
    late = [{"input": "", "output": ""}] * 4
    assert await rated("import time; time.sleep(60)", *late, rater=hasty) == 0.0


def test_a_time_limit_that_would_make_ratings_missing_is_refused() -> None:
    with pytest.raises(ConfigError, match="an answer could make its rating missing"):
        load_member(RaterConfig(rater="code", timeout_s=5))


async def test_it_can_write_nowhere_but_into_its_scratch_folder(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    assert await rated(f"open({str(victim)!r}, 'w').write('owned'); print('ok')", {"output": "ok"}) == 0.0
    assert await rated(f"import os; os.remove({str(victim)!r}); print('ok')", {"output": "ok"}) == 0.0
    assert victim.read_text() == "mine"
    assert await rated("open('own', 'w').write('x'); print(open('own').read())", {"output": "x"}) == 1.0


async def test_it_sees_and_strikes_no_process_but_its_own() -> None:
    struck: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: struck.append(1))
    try:
        code = (
            "import os, signal\n"
            f"try:\n    os.kill({os.getpid()}, signal.SIGUSR1); print('sent')\n"
            "except ProcessLookupError:\n    print('none')\n"
            f"print(os.path.exists('/proc/{os.getpid()}/environ'))"
        )
        assert await rated(code, {"output": "none False"}) == 1.0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not struck


async def test_it_inherits_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "canary")
    assert await rated("import os; print('SECRET_KEY' in os.environ)", {"output": "False"}) == 1.0


async def test_it_cannot_undo_its_confinement() -> None:
    code = (
        "import ctypes; c = ctypes.CDLL(None)\n"
        "print(c.mount(None, b'/', None, 32 | 4096, None), c.sethostname(b'x', 1), c.umount(b'/proc'))"
    )
    assert await rated(code, {"output": "-1 -1 -1"}) == 1.0
