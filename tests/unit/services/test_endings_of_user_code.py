"""Code of users that ends the process is named, whatever code it ends with."""

import logging
from pathlib import Path

import pytest

from lachesis.pipeline.environment.load import item_keys_of, load_environment
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


@pytest.mark.parametrize("code", range(14))
def test_a_code_of_os_exit_is_believed_by_nobody(code: int) -> None:
    life = ProcessLife(code, 0.5, ready=False, noted=False)
    assert Restarts().why_last(life) is None
    assert str(life) == (
        f"ended with code {code} (it gave no reason, so code that it runs has ended it, by os._exit or exec)"
    )
