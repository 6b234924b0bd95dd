"""Code of users that ends the process is named, whatever code it ends with."""

import asyncio
import logging
import signal
import sys
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from lachesis.pipeline.common.user_code import load_attribute, refuse_ending
from lachesis.pipeline.environment.load import item_keys_of, load_environment
from lachesis.pipeline.errors import EnvironmentCodeError
from lachesis.pipeline.scorer.config import RaterConfig
from lachesis.pipeline.scorer.loader import find_rater, load_member
from lachesis.services.process.service_process import EXIT_OWN_CODE, _explain
from lachesis.services.supervisor.restarts import ProcessLife, Restarts

ENVIRONMENT = """
import sys
from lachesis import Environment, Task
{at_import}
class Mine(Environment):
    def __init__(self, code: int) -> None:
        {in_constructor}
    def __len__(self) -> int:
        {in_len}
        return 5
    def item_keys(self) -> object:
        {in_keys}
        return super().item_keys()
    def task(self, index: int) -> Task:
        return Task(item="a", prompt="b")
"""
PLACES = ["at_import", "in_constructor", "in_len", "in_keys"]
CODES = [*range(14), 70, 255, "text", None]


def write(folder: Path, place: str, code: object) -> str:
    lines = {name: f"sys.exit({code!r})" if name == place else "pass" for name in PLACES}
    file = folder / "mine.py"
    file.write_text(ENVIRONMENT.format(**lines))
    return str(file)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("code", CODES)
def test_an_environment_that_ends_the_process_is_named(
    place: str, code: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Exception, match="SystemExit") as caught:
        item_keys_of(load_environment(f"{write(tmp_path, place, code)}:Mine", {"code": 1}))
    check(caught.value, code, caplog)


def test_the_users_line_is_named_where_a_package_stands_in_place_of_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As wandb does from its first run on."""
    hooks = tmp_path / "site-packages" / "exit_hooks.py"
    hooks.parent.mkdir()
    hooks.write_text("def leave(code=None):\n    raise SystemExit(code)\n")
    monkeypatch.setattr(sys, "exit", load_attribute(str(hooks), "leave", "hooks"))
    with pytest.raises(Exception, match="SystemExit") as caught:
        item_keys_of(load_environment(f"{write(tmp_path, 'in_len', 3)}:Mine", {"code": 1}))
    check(caught.value, 3, caplog)


@pytest.mark.parametrize("code", CODES)
def test_a_rater_that_ends_the_process_at_its_import_is_named(
    code: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Exception, match="SystemExit") as caught:
        find_rater(f"{write(tmp_path, 'at_import', code)}:mine")
    check(caught.value, code, caplog)


@pytest.mark.parametrize("code", CODES)
def test_a_rater_that_ends_the_process_as_it_is_made_is_named(
    code: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom lachesis.pipeline.scorer.rater import Rater\nclass Mine(Rater):\n    bounds = (0, 1)\n"
        f"    def __init__(self): sys.exit({code!r})\n    def rate(self, sample): return 0.0\n"
    )
    with pytest.raises(Exception, match="SystemExit") as caught:
        load_member(RaterConfig(rater=f"{tmp_path}/mine.py:Mine"))
    check(caught.value, code, caplog)


def check(error: Exception, code: object, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    assert _explain(error) == EXIT_OWN_CODE
    assert f"ends the process: SystemExit({code!r}) (mine.py, line " in caplog.text
    assert "Traceback" not in caplog.text
    assert "disk" not in caplog.text


_ENDING = r"its code (ends the process|cancels itself): \w+\(.*, line \d+"
RAISED = {
    "SystemExit": "raise SystemExit(8)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "GeneratorExit": "raise GeneratorExit",
    "CancelledError": "raise asyncio.CancelledError",
    "Own": "raise type('Own', (BaseException,), {})()",
    "grouped": "raise BaseExceptionGroup('several', [ValueError(), SystemExit(8)])",
}


@pytest.mark.parametrize("statement", RAISED.values(), ids=RAISED.keys())
async def test_what_would_end_a_process_or_a_task_is_a_failure_of_its_code(statement: str) -> None:
    async def hook() -> None:
        await anyio.lowlevel.checkpoint()
        exec(statement)  # noqa: S102 - the case's own

    with pytest.raises(EnvironmentCodeError, match=_ENDING), refuse_ending("its code"):
        exec(statement)  # noqa: S102 - as above
    with pytest.raises(EnvironmentCodeError, match=_ENDING), refuse_ending("its code"):
        await hook()


def test_a_persons_interrupt_is_no_failure_of_the_code() -> None:
    def code() -> int:
        signal.raise_signal(signal.SIGINT)
        return sum(range(1000))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), refuse_ending("its code"):
            code()
    finally:
        signal.signal(signal.SIGINT, before)


async def test_a_cancelled_hook_is_no_failure_of_its_code() -> None:
    async def hook() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            with anyio.CancelScope():
                await anyio.sleep_forever()

    with anyio.move_on_after(0.01) as scope:
        with refuse_ending("its code"):
            await hook()
    assert scope.cancelled_caught
    with anyio.move_on_after(5), refuse_ending("its code"):
        with anyio.move_on_after(0.01):
            await hook()  # what the code cancels by itself stays its own
    waits = asyncio.ensure_future(anyio.sleep_forever())
    waits.cancel()
    with (
        pytest.raises(EnvironmentCodeError, match="its code cancels itself: CancelledError"),
        refuse_ending("its code"),
    ):
        await waits


async def test_a_hook_that_is_closed_half_way_is_no_failure_of_its_code() -> None:
    async def hook() -> None:
        with refuse_ending("its code"):
            await anyio.sleep_forever()

    coroutine = hook()
    coroutine.send(None)
    coroutine.close()


@pytest.mark.parametrize("code", range(14))
def test_a_code_of_os_exit_is_believed_by_nobody(code: int) -> None:
    life = ProcessLife(code, 0.5, ready=False, noted=False)
    assert Restarts().why_last(life) is None
    assert str(life) == (
        f"ended with code {code} (it gave no reason, so code that it runs has ended it, by os._exit or exec)"
    )
