# ruff: noqa: INP001 - a script, no package
"""Deletes the extensions from a copy of the tree, and finds that all else still works.

Run by `make lint`; `make lint EXTENSIONS_ARGS=--tests` runs the unit tests there, too. No extension imports another
one (a contract of import-linter), so a copy without any shows what copies without one of them would show: types,
contracts, and with `--tests` the tests of `make unit`. What is cheap is done without each in turn: the commands, and
`lachesis doctor`.
`--keep FOLDER` leaves the copy without any there.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTENSIONS = ROOT / "pipeline" / "extensions"
GROUPS = ("lachesis.extensions", "lachesis.commands")
_LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true", help="run the tests of `make unit`, too")
    parser.add_argument("--keep", type=Path, help="folder that the copy is left in")
    wanted = parser.parse_args()
    names = sorted(folder.name for folder in EXTENSIONS.iterdir() if (folder / "__init__.py").is_file())
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as threads:
        bare = copy_without(names, wanted.keep or Path(scratch) / "bare")
        if (ROOT / ".mypy_cache").is_dir():
            shutil.copytree(ROOT / ".mypy_cache", bare / ".mypy_cache")  # what has not changed is not checked again
        todo = [  # the longest first; what each is called, where it runs, and what Python runs there
            ("types without any extension", bare, ["-m", "mypy"]),
            ("contracts without any extension", bare, ["-c", _LINT_IMPORTS]),
        ]
        copies = {name: copy_without([name], Path(scratch) / name) for name in names}
        todo += [
            (f"lachesis {' '.join(command)} without {name}", copy, ["-m", "lachesis", *command])
            for name, copy in copies.items()
            for command in (["--help"], ["env", "--help"], ["run"], ["config", "show"], ["env", "list"], ["doctor"])
        ]
        failed = any(list(threads.map(run, *zip(*todo, strict=True))))
        if wanted.tests:  # afterwards: they take all cores by themselves
            unit = "not slow and not outside and not extension"
            tests = ["-m", "pytest", "-q", "-n", "2", "-m", unit, "tests/unit"]
            ended = run("tests without any extension", bare, tests)
            if ended == 1:  # as in `.ci/run`: tests failed, all ran; once more, one at a time
                again = ["--last-failed", "--last-failed-no-failures", "none", "-n", "0", "-rA"]
                ended = run("what failed of them, once more", bare, [*tests, *again])
            failed |= ended != 0
    return 1 if failed else 0


def copy_without(names: Sequence[str], target: Path) -> Path:
    """Copy what git knows to `target`, without these extensions and what names them on their behalf."""
    places = [f"pipeline.extensions.{name}" for name in names]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in filter(None, listed.split("\0")):
        source = ROOT / path
        if path.startswith("tests/") and any(place in source.read_text(errors="replace") for place in places):
            continue  # a test of the extension, wherever it is
        if any(Path(path).is_relative_to(folder) for name in names for folder in folders_of(name)):
            continue
        if source.is_symlink() or source.is_file():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / path, follow_symlinks=False)
    for file in ("pyproject.toml", "src/lachesis/__init__.py"):  # entry points, and public names
        lines = (target / file).read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if not any(place in line for place in places)]
        (target / file).write_text("".join(kept), encoding="utf-8")
    describe(target)
    return target


def folders_of(name: str) -> tuple[str, str]:
    return f"pipeline/extensions/{name}", f"tests/unit/extensions/{name}"


def describe(target: Path) -> None:
    """Write what an installation would: the package's name and version, and its entry points."""
    project = tomllib.loads((target / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = target / "src" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    text = ""
    for group in GROUPS:
        points = project["entry-points"].get(group, {})
        text += "".join((f"[{group}]\n", *(f"{name} = {place}\n" for name, place in points.items())))
    (folder / "entry_points.txt").write_text(text)


def run(what: str, folder: Path, command: Sequence[str]) -> int:
    """Run Python in a copy; return how it ended, and print what it said if it failed."""
    environ = {**os.environ, "PYTHONPATH": str(folder / "src"), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"== {what}: {done.returncode} ==\n{done.stdout[-20_000:]}\n{done.stderr[-20_000:]}")
    else:
        print(f"{what}: well", flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
