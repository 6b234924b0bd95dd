import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from lachesis.pipeline.environment import spelling_tasks
from lachesis.pipeline.environment.source_files import scan_files
from lachesis.pipeline.environment.source_scan import MAX_SOURCE_BYTES, EnvironmentField, find_environments
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.environments import env_list, env_show

pytestmark = [pytest.mark.hostile, pytest.mark.outside]

ATROPOS = b'''
import raise_if_imported
from pydantic import Field
from atroposlib.envs.base import BaseEnv as Base, BaseEnvConfig

raise SystemExit("this was run")

class Config(BaseEnvConfig):
    hops: int = Field(default=2, description="How many hops")
    path: str
    """The data."""
    seed: int = Field(..., description="Of the draw")

class Shared(Base):
    env_config_cls = Config

class Sums(Shared):
    """Adds numbers."""
    async def get_next_item(self): ...
    async def score(self, item): ...
'''
OURS = b"""
import lachesis
class Sums(lachesis.Environment):
    def __init__(self, largest: int = 99, *, split="train"): ...
    def task(self, index): ...
"""
VERIFIERS = b'''
import verifiers as vf
def load_environment(split: str = "train", **kwargs) -> vf.Environment:
    """Loads it."""
'''


@pytest.mark.extension
def test_environments_of_atropos_are_found_with_the_fields_of_their_configuration() -> None:
    shared, sums = find_environments(ATROPOS)
    assert (shared.name, sums.name, sums.family, sums.docstring) == ("Shared", "Sums", "atropos", "Adds numbers.")
    assert sums.methods == ["get_next_item", "score"]
    assert sums.fields == [
        EnvironmentField(name="hops", type="int", default="2", help="How many hops"),
        EnvironmentField(name="path", type="str", help="The data."),
        EnvironmentField(name="seed", type="int", help="Of the draw"),
    ]


def test_environments_of_ours_and_of_verifiers_are_found_with_their_parameters() -> None:
    (ours,) = find_environments(OURS)
    assert (ours.family, ours.docstring, ours.methods) == ("lachesis", None, ["task"])
    assert [(one.name, one.type, one.default) for one in ours.fields] == [
        ("largest", "int", "99"), ("split", None, "'train'"),
    ]  # fmt: skip
    (theirs,) = find_environments(VERIFIERS)
    assert (theirs.name, theirs.family, [one.name for one in theirs.fields]) == (
        "load_environment", "verifiers", ["split"],
    )  # fmt: skip
    (builtin,) = find_environments(Path(spelling_tasks.__file__).read_bytes())
    assert builtin.name == "SpellBackward"


def test_the_help_of_parameters_is_what_their_docstring_says_of_them() -> None:
    source = b'''
import verifiers as vf
def load_environment(split="train", items=9, seed=0, rows=None) -> vf.Environment:
    """Load it.

    Args:
        split (str): which part,
            one of two
        items: how many

    `seed`, `rows`: of the draw. A size: not a parameter. Raises ValueError.
    """
'''
    (found,) = find_environments(source)
    assert {one.name: one.help for one in found.fields} == {
        "split": "which part, one of two",
        "items": "how many",
        "seed": "of the draw. A size: not a parameter.",
        "rows": "of the draw. A size: not a parameter.",
    }


def test_classes_of_other_packages_and_circles_of_bases_are_no_environments() -> None:
    assert find_environments(b"from jinja2 import Environment\nclass A(Environment): ...") == []
    assert find_environments(b"def load_environment(name): ...") == []
    assert find_environments(b"class Environment(B): ...\nclass B(Environment): ...") == []


@pytest.mark.parametrize(
    "source",
    [
        b"class Environment(",
        b"Environment = '\xff'",
        b"Environment\0",
        b"Environment = " + b"-" * 100_000 + b"1",
        b"Environment" + b".a" * 100_000,
        b"Environment = " + b"(" * 5000 + b")" * 5000,
        b"Environment" + b"#" * MAX_SOURCE_BYTES,
        b"Environment = f'" + b"a" * 100_000 + b"{a}" * 30_000 + b"'",
        b"Environment\n" + b"".join(b"class A%d: 0\n" % number for number in range(3000)),
        OURS
        + b"class Many(Sums):\n  def __init__(self, "
        + b", ".join(b"a%d: int = 0" % number for number in range(1000))
        + b"): ...\n"
        + b"".join(b"class Sums%d(Many): ...\n" % number for number in range(500)),
    ],
    ids=["broken", "not-utf8", "null", "signs", "attributes", "brackets", "large", "texts", "classes", "settings"],
)
def test_hostile_source_is_refused(source: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^(is no Python:|is nested too deeply|is larger than|has .*more than \d+ )"):
        find_environments(source)


@pytest.mark.slow
def test_source_of_the_largest_size_takes_little_memory() -> None:
    """A statement of two bytes takes the most of all."""
    filled = b"Environment\n" + b"a\n" * ((MAX_SOURCE_BYTES - 12) // 2)
    code = "import sys; from lachesis.pipeline.environment.source_scan import find_environments\n"
    code += "find_environments(sys.stdin.buffer.read())\n"
    code += "print(open('/proc/self/status').read())"  # the ru_maxrss of a child begins with that of its parent
    done = subprocess.run([sys.executable, "-c", code], input=filled, capture_output=True, check=True)
    (peak,) = [int(line.split()[1]) for line in done.stdout.decode().splitlines() if line.startswith("VmHWM")]
    assert peak < 400 << 10  # KiB


@pytest.mark.extension
def test_a_folder_is_listed_and_what_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "sums.py").write_bytes(ATROPOS)
    (tmp_path / "broken.py").write_bytes(b"class Environment(")
    (tmp_path / "plain.py").write_bytes(b"x = 1")
    (tmp_path / "gone.py").symlink_to("nowhere")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "ours.py").write_bytes(OURS)
    files = scan_files(tmp_path)
    assert [(Path(file.path).name, len(file.environments), file.problem is None) for file in files] == [
        ("broken.py", 0, False), ("gone.py", 0, False), ("sums.py", 2, True),
    ]  # fmt: skip
    env_list([tmp_path], as_json=True)
    assert json.loads(capsys.readouterr().out)["files"][2]["environments"][1]["name"] == "Sums"
    env_list([tmp_path])
    shown = capsys.readouterr().out
    assert "Adds numbers." in shown
    assert "broken.py: is no Python" in shown


@pytest.mark.extension
def test_show_prints_one_environment_and_names_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sums.py"
    file.write_bytes(ATROPOS)
    env_show(f"{file}:Sums")
    shown = capsys.readouterr().out
    assert "How many hops" in shown
    assert "Adds numbers." in shown
    with pytest.raises(ConfigError, match="it has Shared, Sums"):
        env_show(f"{file}:Products")


def test_texts_and_names_that_are_no_text_can_be_written_as_json(tmp_path: Path) -> None:
    source = "from lachesis import Environment\nclass One(Environment):\n  '\\ud800 half'\n"
    (tmp_path / os.fsdecode(b"bad\xff.py")).write_text(source)
    (found,) = scan_files(tmp_path)
    written = msgspec.json.decode(msgspec.json.encode(found))
    assert written["path"].endswith("bad\\udcff.py")
    assert written["environments"][0]["docstring"] == "\\ud800 half"
