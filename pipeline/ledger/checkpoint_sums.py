"""Checksums of a folder in the form of `b3sum`, the program of BLAKE3.

`b3sum -c B3SUMS` checks a checkpoint without us. SHA-256 would take two and a half times as long.

Guarantees that a folder that passes `verify_sums` is, file for file and byte for byte, the one that was sealed: a torn,
flipped, exchanged, missing or added file is named before anything in the folder is parsed.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from lachesis.pipeline.common.small_files import read_small_text
from lachesis.pipeline.errors import CheckpointError

__all__ = ["SUMS", "verify_sums", "write_sums"]

SUMS = "B3SUMS"
_BLOCK_BYTES = 1 << 20
_THREADS = 4
_LINE = re.compile(r"([0-9a-f]{64})  ([^\\\n]+)")


def write_sums(folder: Path) -> None:
    """Seal the files of `folder`, including those in its subfolders."""
    names = sorted(_names(folder) - {SUMS})
    lines = [f"{digest}  {name}\n" for name, digest in zip(names, _digests(folder, names), strict=True)]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def verify_sums(folder: Path) -> None:
    """Raise `CheckpointError` if files differ from what was sealed; it names them and says how to go on."""
    fault = _fault(folder)
    if fault is not None:
        raise CheckpointError(
            f"checkpoint {folder}: {fault}. Restore that folder, or `lachesis runs recover` makes its run go on from "
            "the newest checkpoint that is whole"
        )


def _fault(folder: Path) -> str | None:
    try:
        text = read_small_text(folder / SUMS)
    except OSError as error:
        return f"its {SUMS} cannot be read: {error}"
    found = [_LINE.fullmatch(line) for line in text.splitlines()]
    sums = {match[2]: match[1] for match in found if match is not None}
    if not sums or len(sums) != len(found):
        return f"its {SUMS} is damaged"
    present = _names(folder) - {SUMS}
    for what, names in (("missing", sums.keys() - present), ("not its own", present - sums.keys())):
        if names:
            return f"{', '.join(sorted(names)[:5])}: {what}"
    whole = [name for name in sums if (folder / name).is_file() and not (folder / name).is_symlink()]
    try:
        found_digests = dict(zip(whole, _digests(folder, whole), strict=True))
    except OSError as error:
        return f"{error.filename or 'one of its files'} cannot be read: {error.strerror}"
    for name, digest in sums.items():
        if found_digests.get(name) != digest:
            return f"{name} is not what was written"
    return None


def _names(folder: Path) -> set[str]:
    """Return the files in a folder and its subfolders as paths relative to it; folders are not listed."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {path.relative_to(folder).as_posix() for path in paths}


def _digests(folder: Path, names: list[str]) -> list[str]:
    """Return the files' digests, computed several at a time: a checkpoint's weights and moments take nearly all the
    time.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda name: _digest(folder / name), names))


def _digest(path: Path) -> str:
    found, block = blake3(), memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            found.update(block[:size])
    return found.hexdigest()
