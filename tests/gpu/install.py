"""Makes a folder of packages that can be used beside the torch of this machine, without pip and without a network.

    python install.py WHEELS SITE

WHEELS holds wheels (see collect.py). SITE is made again: this project, and of the wheels those that this interpreter
lacks or has older than the project needs. Prints what was taken. SITE goes on PYTHONPATH.
"""

import importlib.metadata
import re
import shutil
import stat
import sys
import tomllib
import zipfile
from pathlib import Path

__all__ = ["extract", "install", "lowest_versions", "normal", "numbers"]

_ROOT = Path(__file__).parents[2]
_NAME = re.compile(r"[-_.]+")


def install(wheels: Path, site: Path) -> list[str]:
    """Fill `site` and return the wheels taken."""
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    _link_ourselves(site / "lachesis")
    _name_ourselves(site)
    lowest = lowest_versions()
    taken = []
    for wheel in sorted(wheels.glob("*.whl")):
        name, version = _parts(wheel)
        found = _installed(name)
        if found is None or numbers(found) < numbers(lowest.get(name, "0")):
            extract(wheel, site)
            taken.append(f"{name} {version}" + ("" if found is None else f" in place of {found}"))
    return taken


def extract(wheel: Path, site: Path) -> None:
    """Unpack a wheel; its scripts go to `site/bin`."""
    with zipfile.ZipFile(wheel) as packed:
        for entry in packed.infolist():
            if entry.is_dir():
                continue
            first, _, rest = entry.filename.partition("/")
            target = site / entry.filename
            if first.endswith(".data"):
                kind, _, rest = rest.partition("/")
                target = site / ("bin" if kind == "scripts" else "." if kind in ("purelib", "platlib") else kind) / rest
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(packed.read(entry))
            if target.parent.name == "bin" or entry.external_attr >> 16 & stat.S_IXUSR:
                target.chmod(target.stat().st_mode | stat.S_IXUSR)


def lowest_versions() -> dict[str, str]:
    """Return by package the oldest version that the project can use."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    found = {}
    for line in wanted:
        match = re.match(r"([A-Za-z0-9._-]+)[^>]*>=([0-9.]+)", line)
        if match:
            found[normal(match[1])] = match[2]
    return found


def _link_ourselves(package: Path) -> None:
    """Put the package there by links: those of the tree itself may not have travelled with it."""
    package.mkdir()
    for source in (_ROOT / "src" / "lachesis").glob("*.py"):
        (package / source.name).symlink_to(source)
    for name in ("schemas", "pipeline", "services"):
        (package / name).symlink_to(_ROOT / name)


def _name_ourselves(site: Path) -> None:
    """Let the interpreter find this project as an installed one."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    info = site / f"lachesis_rl-{project['version']}.dist-info"
    info.mkdir()
    required = "".join(f"Requires-Dist: {line}\n" for line in project["dependencies"])
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head + required)


def _parts(wheel: Path) -> tuple[str, str]:
    name, version = wheel.name.split("-")[:2]
    return normal(name), version


def normal(name: str) -> str:
    """Return a package's name as all spellings of it compare."""
    return _NAME.sub("-", name).lower()


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return a version's first three numbers."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


if __name__ == "__main__":
    for line in install(Path(sys.argv[1]), Path(sys.argv[2])):
        print(line)
