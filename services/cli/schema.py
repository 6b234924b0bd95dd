"""`lachesis schema`: the wire's documents, printed, written or compared."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lachesis.schemas.asyncapi import documents
from lachesis.schemas.errors import ConfigError

__all__ = ["schema"]

CHECKED_IN = Path("deploy/schema")


def schema(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder to write the files to; with --check, to compare them with."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if DIR (deploy/schema) differs.")] = False,
) -> None:
    """Print the AsyncAPI document, or write it and the JSON Schemas to a folder."""
    wanted = documents()
    if check:
        _check(wanted, out or CHECKED_IN)
    elif out is None:
        sys.stdout.write(wanted["asyncapi.json"])
    else:
        try:
            out.mkdir(parents=True, exist_ok=True)
            for name, text in wanted.items():
                (out / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write to {out}: {error.strerror}") from error
        print(f"wrote {len(wanted)} files to {out}")


def _check(wanted: dict[str, str], folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} to check; name it with --out DIR")
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    wrong = {
        "missing": wanted.keys() - found.keys(),
        "left over": found.keys() - wanted.keys(),
        "different": {name for name in wanted.keys() & found.keys() if wanted[name] != found[name]},
    }
    for what, names in wrong.items():
        for name in sorted(names):
            print(f"{what}: {folder / name}", file=sys.stderr)
    if any(wrong.values()):
        print(f"write them again: lachesis schema --out {folder}", file=sys.stderr)
        sys.exit(1)
    print(f"{len(wanted)} files in {folder} are up to date")
