"""Weights files: `<folder>/<version>.safetensors`, one for each policy version.

Guarantees: a file under its final name is complete and on disk (written under another name, synced, renamed);
`read_weights` returns tensors only when the file is named, labelled and filled as the version says: its metadata, the
digest of its content, and names, shapes and dtypes of every tensor.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lachesis.pipeline.fsync import fsync, make_folder
from lachesis.pipeline.model.raw_weights import weights_path
from lachesis.pipeline.model.tensors import check_coverage, weights_digest, widened
from lachesis.schemas.errors import DataError, NotFoundError
from lachesis.schemas.ids import PolicyVersion

__all__ = ["path_inside", "prune_weights", "read_weights", "travel_dtype", "weights_path", "write_weights"]

_ROUNDED = "rounded_to"
"""Label of a file whose floating-point tensors were rounded."""


def path_inside(folder: Path, path: str) -> Path:
    """Return the path without links or dots.

    Raises DataError unless it lies in `folder`, which is resolved already.

    Whoever reaches an inference server may name a file to it.
    """
    try:
        found = Path(path).resolve()
    except (ValueError, OSError) as error:  # a null byte, a name beyond the system's limits
        raise DataError(f"path: {error}") from error
    if not found.is_relative_to(folder):
        raise DataError(f"weights are read from {folder} alone, not from {found}.")
    return found


def write_weights(
    tensors: Mapping[str, torch.Tensor], folder: str | Path, version: PolicyVersion, dtype: str = "float32"
) -> Path:
    """Write the weights of `version` and return the path.

    Writing a version again replaces it by the same content. `dtype`: what they were rounded to (`tensors.rounded`),
    which the file says; float32: they were not.

    What a writer that was killed had begun here is removed: one process at a time writes a folder.
    Raises DataError when the tensors do not have the version's digest.
    """
    _check_digest(tensors, version, "the tensors to be written")
    path = weights_path(folder, version)
    make_folder(path.parent)
    for leftover in path.parent.glob(".*.safetensors.*.partial"):
        leftover.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        labels = {"policy_version": str(version)} | ({} if dtype == "float32" else {_ROUNDED: dtype})
        save_file(copies, partial, metadata=labels)
        fsync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync(path.parent)
    return path


def read_weights(
    path: str | Path, version: PolicyVersion, expected: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of the file, each of which has the name, shape and dtype of one in `expected`.

    In a file of weights that were rounded to bfloat16 they have that dtype, and are returned in the one expected.

    Raises NotFoundError when there is no such file (it may have been pruned: ask for a newer version), DataError when
    it is damaged, belongs to another version or does not cover `expected` exactly.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise DataError(f"weights file {path} is no regular file.")
    try:
        with safe_open(path, framework="pt") as file:
            labels = file.metadata() or {}
            label = labels.get("policy_version")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError as error:
        raise NotFoundError(f"weights file {path} does not exist; it may have been pruned.") from error
    except (SafetensorError, OSError) as error:
        raise DataError(f"weights file {path} cannot be read: {error}.") from error
    if label != str(version):
        raise DataError(f"weights file {path} holds policy version {label!r}, not {str(version)!r}.")
    loaded = widened(tensors, expected) if labels.get(_ROUNDED) == "bfloat16" else tensors
    check_coverage(loaded, expected, f"weights file {path}")
    _check_digest(tensors, version, f"weights file {path}")
    return loaded


def travel_dtype(path: str | Path) -> str:
    """Return what the weights of a file that `write_weights` made were rounded to; float32: they were not."""
    with safe_open(path, framework="pt") as file:
        labels: dict[str, str] = file.metadata() or {}
    return labels.get(_ROUNDED, "float32")


def prune_weights(folder: str | Path, *, keep: int, protect: Collection[PolicyVersion] = ()) -> list[Path]:
    """Delete all but the `keep` files written last, sparing the versions in `protect`.

    Return what was deleted.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the newest weights file must stay.")
    spared = {weights_path(folder, version) for version in protect}
    files = sorted(Path(folder).glob("[!.]*.safetensors"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    doomed = [path for path in files[:-keep] if path not in spared]
    for path in doomed:
        path.unlink(missing_ok=True)
    return doomed


def _check_digest(tensors: Mapping[str, torch.Tensor], version: PolicyVersion, where: str) -> None:
    digest = weights_digest(tensors)
    if not version.digest or not digest.startswith(version.digest):
        raise DataError(f"{where} have digest {digest[:12]}, but policy version {version} was requested.")
