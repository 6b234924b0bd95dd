"""Loading a user's files and modules, from several threads at once."""

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lachesis.pipeline.common.user_code import load_module
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemPool
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.scorer.config import RaterConfig
from lachesis.pipeline.scorer.loader import load_member
from lachesis.schemas.errors import ConfigError

TWO = """
import sys
from dataclasses import dataclass
from lachesis.pipeline.curriculum.logic.strategy import Strategy
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.scorer.rater import rater

sys.modules["meeting"].meet()

@dataclass
class Setting:
    size: "int" = 3

class First(Environment):
    def __len__(self):
        return Setting().size

    def task(self, index):
        raise NotImplementedError

    async def reward(self, task, session):
        return {}

class Second(First):
    pass

@rater(bounds=(0.0, 1.0))
def half(sample):
    return 0.5

class Own(Strategy):
    pass
"""
OVERTAKE_S = 0.3
"""How long a file runs on once two threads ask for it: a thread that does not wait for the other has ended by then."""


class Meeting:
    """Lets a file run on while another thread asks for it as well; stands in `sys.modules` as `meeting`."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.overtaken = threading.Event()
        self.runs = 0

    def meet(self) -> None:
        self.runs += 1
        self.entered.set()
        self.overtaken.wait(OVERTAKE_S)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    found = Meeting()
    monkeypatch.setitem(sys.modules, "meeting", found)  # type: ignore[arg-type]
    return found


def together(meeting: Meeting, first: Callable[[], Any], second: Callable[[], Any]) -> list[Any]:
    """Return what both give, the second called while the first runs the file; exceptions are among it."""
    found: list[Any] = [None, None]

    def call(n: int, load: Callable[[], Any]) -> None:
        try:
            found[n] = load()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[n] = error

    def overtake() -> None:
        meeting.entered.wait(30)
        call(1, second)
        meeting.overtaken.set()

    threads = [threading.Thread(target=call, args=(0, first)), threading.Thread(target=overtake)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def environment(place: str, name: str) -> Callable[[], Any]:
    return lambda: type(load_environment(f"{place}:{name}")).__name__


def of_rater(place: str) -> str:
    return load_member(RaterConfig(rater=f"{place}:half")).name


def of_strategy(place: str) -> str:
    return type(load_strategy(ItemPool(3), CurriculumConfig(strategy=f"{place}:Own"))).__name__


@pytest.mark.parametrize("by", ["file", "module"])
def test_two_environments_of_one_file_load_at_once(
    tmp_path: Path, meeting: Meeting, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    file = tmp_path / f"two_by_{by}.py"
    file.write_text(TWO)
    monkeypatch.syspath_prepend(tmp_path)
    place = str(file) if by == "file" else file.stem
    assert together(meeting, environment(place, "First"), environment(place, "Second")) == ["First", "Second"]
    assert meeting.runs == 1


def test_raters_and_strategies_load_from_files_too_and_all_of_one_file_at_once(
    tmp_path: Path, meeting: Meeting
) -> None:
    place = tmp_path / "all.of.it.py"
    place.write_text(TWO)
    assert together(meeting, lambda: of_rater(str(place)), lambda: of_strategy(str(place))) == ["half", "Own"]
    assert environment(str(place), "Second")() == "Second"
    assert meeting.runs == 1


def test_a_load_that_fails_leaves_nothing_behind_and_each_thread_is_told_why(tmp_path: Path, meeting: Meeting) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import sys\nsys.modules['meeting'].meet()\nraise OSError('no data set yet')\n")
    loads = [lambda: load_module(str(file), "environment")] * 2
    before = set(sys.modules)
    assert [str(error) for error in together(meeting, *loads)] == ["no data set yet"] * 2
    assert set(sys.modules) == before
    file.write_text("ready = True\n# and of another length\n")
    assert load_module(str(file), "environment").ready


def test_files_that_import_one_another_load_from_two_threads(
    tmp_path: Path, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = "import sys\nsys.modules['meeting'].meet()\n"
    (tmp_path / "chicken.py").write_text(f"{wait}import egg\nname = 'chicken'\nother = lambda: egg.name\n")
    (tmp_path / "egg.py").write_text(f"{wait}import chicken\nname = 'egg'\nother = lambda: chicken.name\n")
    monkeypatch.syspath_prepend(tmp_path)
    chicken, egg = together(
        meeting, lambda: load_module("chicken", "environment"), lambda: load_module("egg", "environment")
    )
    assert (chicken.other(), egg.other()) == ("egg", "chicken")


def test_a_file_that_loads_another_that_loads_it(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.py", tmp_path / "theirs.py"
    call = "from lachesis.pipeline.common.user_code import load_module\nother = load_module({!r}, 'environment')\n"
    ours.write_text(call.format(str(theirs)))
    theirs.write_text(call.format(str(ours)))
    loaded = load_module(str(ours), "environment")
    assert loaded.other.other is loaded


def test_objects_of_a_file_can_be_pickled(tmp_path: Path, meeting: Meeting) -> None:
    file = tmp_path / "kept.py"
    file.write_text(TWO)
    setting = load_module(str(file), "environment").Setting(5)
    assert pickle.loads(pickle.dumps(setting)) == setting  # noqa: S301


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rater: there is no file .*none\.py'; a path in a configuration"):
        load_module(str(tmp_path / "none.py"), "rater")
    with pytest.raises(ConfigError, match=r"rater: module 'no\.such' was not found"):
        load_module("no.such", "rater")


def test_a_module_of_the_current_folder_that_another_one_hides_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shown_here.py").write_text("answer = 1")
    assert load_module("shown_here", "rater").answer == 1
    (tmp_path / "json.py").write_text("answer = 1")
    with pytest.raises(
        ConfigError, match=r"module 'json' is .*json/__init__\.py, and not json\.py of this .*json\.py:N"
    ):
        load_module("json.decoder", "rater")
    assert load_module("json.py", "rater").answer == 1
    (tmp_path / "sys").mkdir()
    assert load_module("sys", "rater") is sys
    (tmp_path / "sys" / "__init__.py").touch()
    with pytest.raises(ConfigError, match=r"module 'sys' is a part of Python, and not sys/__init__\.py of"):
        load_module("sys", "rater")


@pytest.mark.outside
@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [["-m", "lachesis"], ["-P", "-c", "from lachesis.services.cli import main; main()"]]
)
def test_files_of_the_current_folder_that_are_called_as_packages_are_not_imported(
    tmp_path: Path, program: list[str]
) -> None:
    for name in ("random", "queue", "copy", "tokenizers", "nats", "msgspec", "numpy", "pyarrow", "transformers"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported {name}')")
    (tmp_path / "mine.py").write_text("from lachesis.pipeline.environment.dataset import Dataset as Mine")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}')
    command = [sys.executable, *program, "env", "verify", "mine:Mine", "--params", '{"path": "rows.jsonl"}']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.outside
def test_an_interpreter_without_docstrings_is_refused_before_anything_is_started() -> None:
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "lachesis", "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "PYTHONOPTIMIZE=2 (-OO) removes the docstrings that transformers reads" in done.stderr
