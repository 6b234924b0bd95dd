# ruff: noqa: INP001 - a script, no package
"""Write the hashes of what `make` and CI install, or with `--check` compare them with constraints.txt. No network then.

deploy/locked/demo.txt is what `make demo` installs, deploy/locked/dev.txt what the tests need beside it; image.txt and
image-light.txt hold what of both goes into the images. pip takes all of them with --require-hashes. torch is in none:
its CPU and CUDA builds have the same version, come from several indexes and have other hashes. It is pinned by version
alone, and so is what only a CUDA build of it brings along.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LOCKED = ROOT / "deploy" / "locked"
FILES = ("demo.txt", "dev.txt")
DEMO_EXTRAS = ("demo",)
IMAGES = {"image.txt": ("train", "auth", "otel"), "image-light.txt": ("auth", "otel")}
"""The extras that each image of deploy/Dockerfile holds."""
UNHASHED = {"torch"}
BUILD = {"setuptools"}
"""What builds the package itself: it is installed with the demo, since pip takes no hashes for a build of its own."""
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
_HASHED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", re.MULTILINE)


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    if arguments == ["--check"]:
        problems = check()
        for problem in problems:
            print(problem, file=sys.stderr)
        if problems:
            print("write the hashes again: make lock", file=sys.stderr)
        return 1 if problems else 0
    write(*arguments)
    return main(["--check"])


def check() -> list[str]:
    """Return how the locked files differ from the constraints."""
    wanted = pins(CONSTRAINTS.read_text())
    for name in UNHASHED:
        wanted.pop(name)
    found: dict[str, str] = {}
    problems = []
    for file in FILES:
        text = (LOCKED / file).read_text()
        hashed = {_normal(name): (version, hashes) for name, version, hashes in _HASHED.findall(text)}
        bare = [name for name in pins(text) if not hashed.get(name, ("", ""))[1]]
        problems += [f"deploy/locked/{file}: {name} has no hash" for name in bare]
        problems += [f"deploy/locked/{file}: {name} is in another file too" for name in pins(text) if name in found]
        found |= pins(text)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            problems.append(f"{name}: {wanted.get(name)} in constraints.txt, {found.get(name)} in deploy/locked")
    entries = {found[0] for file in FILES for found in _HASHED.finditer((LOCKED / file).read_text())}
    for file in IMAGES:
        text = (LOCKED / file).read_text()
        own = {found[0]: found[1] for found in _HASHED.finditer(text)}
        named = [name for entry, name in own.items() if entry not in entries]
        named += sorted(pins(text).keys() - {_normal(name) for name in own.values()})
        problems += [f"deploy/locked/{file}: {name} is otherwise in {' or '.join(FILES)}" for name in named]
    return problems


def write(uv: str = "uv") -> None:
    """Ask the package index for the hashes of every file of every pinned version, with the program `uv`."""
    demo = _needed(uv, DEMO_EXTRAS)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:
        pinned.write("".join(f"{name}=={version}\n" for name, version in pins(CONSTRAINTS.read_text()).items()))
        pinned.flush()
        hashed = _compile(uv, pinned.name, "--generate-hashes", "--no-deps")
    LOCKED.mkdir(exist_ok=True)
    entries = [(_normal(found[1]), found[0]) for found in _HASHED.finditer(hashed)]
    for file, belongs in (("demo.txt", True), ("dev.txt", False)):
        kept = [entry for name, entry in entries if name not in UNHASHED and (name in demo) is belongs]
        lines = ["# Written by `make lock` from constraints.txt.", *kept, ""]
        (LOCKED / file).write_text("\n".join(lines))
    for file, extras in IMAGES.items():
        needed = _needed(uv, extras) - UNHASHED
        kept = [entry for name, entry in entries if name in needed]
        (LOCKED / file).write_text("\n".join(["# Written by `make lock` from constraints.txt.", *kept, ""]))


def _needed(uv: str, extras: tuple[str, ...]) -> set[str]:
    """Return what the package needs with these extras, and what builds it, by normalized name."""
    options = [part for extra in extras for part in ("--extra", extra)]
    return set(pins(_compile(uv, "pyproject.toml", *options, "--constraint", "constraints.txt"))) | BUILD


def pins(text: str) -> dict[str, str]:
    """Return the pinned versions by normalized name."""
    return {_normal(name): version for name, version in _PIN.findall(text)}


def _compile(uv: str, *arguments: str) -> str:
    options = ("--universal", "--python-version", "3.11", "--no-header", "--no-annotate", "--quiet")
    command = [uv, "pip", "compile", *arguments, *options]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
