"""Environments of installed packages: found by files and entry points, in packages laid out as pip lays them out."""

import json
import sys
from pathlib import Path

import pytest

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environment.installed import scan_installed
from lachesis.services.agent.catalog import list_environments, select_environment
from lachesis.services.cli.environments import env_list

RAISES = "raise SystemExit('this was imported')\n"
OURS = (
    RAISES
    + """
import lachesis
class Sums(lachesis.Environment):
    'Adds numbers.'
    def __init__(self, largest: int = 99): ...
"""
)
ATROPOS = RAISES + "from atroposlib.envs.base import BaseEnv\nclass Chess(BaseEnv): ...\n"
VERIFIERS = RAISES + "import verifiers as vf\ndef load_environment(split='train') -> vf.Environment: ...\n"


def install(site: Path, name: str, files: dict[str, str], *, requires: str = "", points: str = "") -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
    (info / "entry_points.txt").write_text(points)
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path, "games", {"games/__init__.py": RAISES, "games/chess.py": ATROPOS}, requires="atroposlib>=0.4")
    install(tmp_path, "gsm", {"gsm.py": VERIFIERS}, requires="verifiers")
    install(tmp_path, "sums", {"sums/__init__.py": OURS}, requires="lachesis_rl (>=0.1)")
    install(tmp_path, "stranger", {"stranger.py": OURS}, requires="numpy")
    install(
        tmp_path, "named", {}, points="[lachesis.environments]\nadding = edited.inner:Sums\nnothing = edited:Gone\n"
    )
    (tmp_path / "edited").mkdir()  # as an editable install has it: on the path, not among the package's files
    (tmp_path / "edited" / "__init__.py").write_text(RAISES)
    (tmp_path / "edited" / "inner.py").write_text(OURS)
    return tmp_path


@pytest.mark.extension
def test_packages_that_need_a_framework_and_entry_points_are_found_and_nothing_is_imported(site: Path) -> None:
    found = scan_installed([str(site)])
    assert [(one.kind, one.environment.family, one.package, one.entry_point) for one in found.environments] == [
        ("edited.inner:Sums", "lachesis", "named", "adding"),
        ("games.chess:Chess", "atropos", "games", None),
        ("gsm:load_environment", "verifiers", "gsm", None),
        ("sums:Sums", "lachesis", "sums", None),
    ]
    assert found.problems == ["named: its entry point nothing names edited:Gone, which is no environment in its source"]
    assert not {"edited", "games", "gsm", "sums"} & sys.modules.keys()


@pytest.mark.extension
def test_a_file_that_cannot_be_read_is_named_and_hides_no_other(site: Path) -> None:
    (site / "games" / "chess.py").write_text("class BaseEnv(")
    (site / "gsm.py").unlink()  # which is left out or named, as the version of importlib.metadata has it
    found = scan_installed([str(site)])
    assert [one.kind for one in found.environments] == ["edited.inner:Sums", "sums:Sums"]
    assert any("chess.py is no Python" in problem for problem in found.problems)
    assert len(set(found.problems)) == len(found.problems)


def test_a_package_with_damaged_metadata_is_named_and_hides_no_other(site: Path) -> None:
    whole = [one.kind for one in scan_installed([str(site)]).environments]
    install(site, "latin", {}, requires="atroposlib")
    (site / "latin-1.0.dist-info" / "METADATA").write_bytes(b"Name: latin\nAuthor: Andr\xe9\n")
    install(site, "torn", {}, points="[lachesis.environments]\nwithout a value\n")
    found = scan_installed([str(site)])
    assert [one.kind for one in found.environments] == whole
    for name in ("latin", "torn"):
        assert any(f"{name}-1.0.dist-info: its metadata cannot be read" in problem for problem in found.problems)


@pytest.mark.extension
@pytest.mark.slow
def test_they_are_listed_and_can_be_selected(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(site))
    env_list(as_json=True)
    kinds = [one["kind"] for one in json.loads(capsys.readouterr().out)["installed"]]
    assert {"edited.inner:Sums", "games.chess:Chess", "gsm:load_environment", "sums:Sums"} <= set(kinds)
    env_list()
    assert "games.chess:Chess" in capsys.readouterr().out
    entries = list_environments(RunConfig(run="r"), [])
    adding = select_environment("adding", entries)
    assert (adding.section, adding.kind, [field.name for field in adding.fields]) == (
        "adding", "edited.inner:Sums", ["largest"],
    )  # fmt: skip
