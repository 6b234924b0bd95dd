"""Checksums of a folder in the form of coreutils.

`sha256sum -c SHA256SUMS` checks a checkpoint without us.

Guarantees that what `verify_sums` lets pass is, file for file and byte for byte, what was sealed: a torn, flipped,
exchanged, missing or added file is named before anything in the folder is parsed.
"""

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lachesis.pipeline.small_files import read_small_text
from lachesis.schemas.errors import CheckpointError

__all__ = ["SUMS", "verify_sums", "write_sums"]

SUMS = "SHA256SUMS"
_THREADS = 4
_LINE = re.compile(r"([0-9a-f]{64})  ([^\\\n]+)")


def write_sums(folder: Path) -> None:
    """Seal the files of `folder`, those in folders inside too."""
    names = sorted(_names(folder))
    lines = [f"{digest}  {name}\n" for name, digest in zip(names, _digests(folder, names), strict=True)]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def verify_sums(folder: Path) -> None:
    """Raise `CheckpointError` naming what differs from what was sealed."""
    try:
        text = read_small_text(folder / SUMS)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: its {SUMS} cannot be read: {error}") from error
    found = [_LINE.fullmatch(line) for line in text.splitlines()]
    sums = {match[2]: match[1] for match in found if match is not None}
    if not sums or len(sums) != len(found):
        raise CheckpointError(f"checkpoint {folder}: its {SUMS} is damaged")
    present = _names(folder)
    for what, names in (("missing", sums.keys() - present), ("not its own", present - sums.keys())):
        if names:
            raise CheckpointError(f"checkpoint {folder}: {', '.join(sorted(names)[:5])}: {what}")
    whole = [name for name in sums if (folder / name).is_file() and not (folder / name).is_symlink()]
    found_digests = dict(zip(whole, _digests(folder, whole), strict=True))
    for name, digest in sums.items():
        if found_digests.get(name) != digest:
            raise CheckpointError(
                f"checkpoint {folder}: {name} is not what was written; take an older checkpoint of that folder"
            )


def _names(folder: Path) -> set[str]:
    """Return what lies in a folder and the folders inside, by path from it; folders themselves have no name."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {path.relative_to(folder).as_posix() for path in paths} - {SUMS}


def _digests(folder: Path, names: list[str]) -> list[str]:
    """Return the files' digests, several at a time: those of a checkpoint's weights and moments take nearly all."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda name: _digest(folder / name), names))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
