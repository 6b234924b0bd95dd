"""The check of names: duplicates, banned identifiers, participles, bare constants and first docstring lines."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

CHECK = Path(__file__).parents[2] / ".ci" / "names.py"


@pytest.fixture(scope="module")
def names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("names_check", CHECK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checked(names: ModuleType, root: Path, **sources: str) -> list[str]:
    for name, source in sources.items():
        path = root / "pipeline" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    found: list[str] = names.check(root)
    return found


def test_good_names_pass(names: ModuleType, tmp_path: Path) -> None:
    source = '"""Counts words."""\n_MAX_WORDS = 3\nclass WordCounter:\n    def add_word(self) -> None: ...\n'
    assert checked(names, tmp_path, words=source) == []


def test_public_classes_of_one_name(names: ModuleType, tmp_path: Path) -> None:
    found = checked(
        names,
        tmp_path,
        one="class Span: ...\nclass _Row: ...\nclass A:\n    class Inner: ...\n",
        two="class Span: ...\nclass _Row: ...\nclass B:\n    class Inner: ...\n",
    )
    assert found == ["pipeline/one.py:1: class 'Span' is defined 2 times, also at pipeline/two.py:1"]


@pytest.mark.parametrize(
    ("source", "line", "said"),
    [
        ("class A:\n    def judge(self): ...\n", 2, "name 'judge' is banned"),
        ("async def _tell(): ...\n", 1, "name '_tell' is banned"),
        ("if True:\n    def take(): ...\n", 2, "name 'take' is banned"),
        ("class Judged: ...\n", 1, "name 'Judged' is banned"),
        ("class _Derived: ...\n", 1, "is a participle"),
        ("_MOST = 3\n", 1, "does not name its quantity"),
        ("LONGEST_NAME: int = 3\n", 1, "does not name its quantity"),
        ('"""What it does."""\n', 1, "begins with 'What'"),
        (f'"""{"a" * 101}"""\n', 1, "has 101 characters"),
        ('def run():\n    """Whose turn it is."""\n', 1, "run: the first docstring line begins with 'Whose'"),
    ],
)
def test_bad_names_are_named(names: ModuleType, tmp_path: Path, source: str, line: int, said: str) -> None:
    (found,) = checked(names, tmp_path, bad=source)
    assert found.startswith(f"pipeline/bad.py:{line}: ")
    assert said in found


@pytest.mark.parametrize(
    "source",
    [
        f'"""{"a" * 100}"""\n',
        'def _run():\n    """What it does."""\n',
        "def run():\n    def take(): ...\n",
        "class Promoted: ...\n",
        "KEY = 'judge'\nmost = 3\n",
        '"""Whatever it takes."""\n',
    ],
)
def test_what_is_allowed(names: ModuleType, tmp_path: Path, source: str) -> None:
    assert checked(names, tmp_path, good=source) == []


def test_a_module_may_not_have_a_banned_name(names: ModuleType, tmp_path: Path) -> None:
    (found,) = checked(names, tmp_path, judging="")
    assert "module name 'judging' is banned" in found


@pytest.mark.outside
def test_the_exit_code_says_whether_anything_was_found(tmp_path: Path) -> None:
    copy = tmp_path / ".ci" / "names.py"
    copy.parent.mkdir()
    copy.write_text(CHECK.read_text())
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "good.py").write_text('"""Counts words."""\n')
    assert subprocess.run([sys.executable, copy], check=False).returncode == 0
    (tmp_path / "pipeline" / "bad.py").write_text("def tell(): ...\n")
    result = subprocess.run([sys.executable, copy], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (
        1,
        "pipeline/bad.py:1: name 'tell' is banned; use publish, report or request\n",
    )
