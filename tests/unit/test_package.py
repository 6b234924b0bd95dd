"""The distribution: the import package is `lachesis`, and nothing else ends up in people's environments."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("schemas", "pipeline", "services")
SHIPPED = {".py", ".toml", ".json", ".typed", ".html", ".css", ".js", ".svg"}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree, so that no earlier build leaks into it."""
    copy = tmp_path_factory.mktemp("source") / "lachesis"
    copy.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*PARTS, "src"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    isolation = [] if importlib.util.find_spec("setuptools") is None else ["--no-build-isolation"]
    run(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--wheel-dir", out, *isolation, cwd=copy)
    (built,) = out.iterdir()
    return built


@pytest.mark.outside
def test_the_wheel_holds_every_module_below_lachesis_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    tree = {
        f"lachesis/{path.relative_to(ROOT)}"
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if path.suffix in SHIPPED
    }
    own = {f"lachesis/{path.name}" for path in (ROOT / "src" / "lachesis").iterdir() if path.is_file()}
    assert inside == tree | own
    assert any(name.endswith("LICENSE") for name in names - inside)


@pytest.mark.slow
@pytest.mark.outside
def test_the_installed_wheel_imports_as_lachesis_and_leaves_the_common_names_alone(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    program = f"""
import importlib, importlib.util, sys
sys.path.insert(0, {str(site)!r})
import lachesis
for part in {PARTS!r}:
    print(importlib.import_module("lachesis." + part).__file__)
    assert importlib.util.find_spec(part) is None, part
import lachesis.pipeline.bus.api, lachesis.schemas.asyncapi, lachesis.services.cli.commands
print(lachesis.services.cli.commands.__file__)
"""
    found = run(sys.executable, "-I", "-c", program, cwd=tmp_path).split()
    assert len(found) == len(PARTS) + 1
    assert all(Path(name).is_relative_to(site) for name in found), found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_type_checker_and_the_interpreter_see_the_same_package(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("lachesis.schemas.ids")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / "schemas" / "ids.py"
    file = tmp_path / "mine.py"
    file.write_text("from lachesis.schemas.ids import PolicyVersion\nreveal_type(PolicyVersion.parse('').step)\n")
    # somebody else's project, so without this one's settings: found by the editable install alone
    unread = "".join(f"[mypy-lachesis.{part}.*]\nfollow_imports = skip\n" for part in ("pipeline", "services"))
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n{unread}")  # `make lint` reads them
    found = run(sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", file, cwd=tmp_path)
    assert 'Revealed type is "int"' in found.replace("builtins.", "")
