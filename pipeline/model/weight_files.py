"""Writes and reads weights files: `<folder>/<version>.safetensors`, one for each policy version.

Guarantees: a file under its final name is complete and on disk (written under another name, synced, renamed);
`read_weights` returns tensors only when the file is named, labelled and filled as the version says: its metadata, the
digest of its content, and names, shapes and dtypes of every tensor; an error names the file, and the tensors that were
altered. Bytes are read once on either side: they are digested while they are written, and while they are copied out of
the mapped file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from lachesis.pipeline.common.fsync import fsync, make_folder
from lachesis.pipeline.model.digest import DIGEST_LENGTH, WeightsDigest
from lachesis.pipeline.model.host_memory import allocate
from lachesis.pipeline.model.policy_file import check_content, check_label, policy_labels, travels_rounded
from lachesis.pipeline.model.replace_tensors import CheckedTensors
from lachesis.pipeline.model.safetensors_files import (
    DTYPES,
    TensorForm,
    copy_checked,
    read_raw,
    weights_path,
    write_digested,
)
from lachesis.pipeline.model.tensors import (
    bytes_of,
    check_forms,
    form_text,
    is_wide,
    tensor_form,
)
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion

__all__ = [
    "path_inside",
    "prune_weights",
    "read_weights",
    "travel_dtype",
    "weights_path",
    "write_new_weights",
    "write_weights",
]


def path_inside(folder: Path, path: str) -> Path:
    """Return the path without links or dots.

    Raises DataError unless it lies in `folder`, which is resolved already.

    A client of an inference server may name a file to it.
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
    return _write(tensors, Path(folder), lambda _: version, dtype)[1]


def write_new_weights(
    tensors: Mapping[str, torch.Tensor], folder: str | Path, step: int, lineage: str, dtype: str = "float32"
) -> tuple[PolicyVersion, Path]:
    """Write the weights after optimizer step `step`; return their version and path.

    See `write_weights`. They are digested as they are written.
    """
    return _write(tensors, Path(folder), lambda digest: PolicyVersion(step, lineage, digest[:DIGEST_LENGTH]), dtype)


def _write(
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    version_of: Callable[[str], PolicyVersion],
    dtype: str,
) -> tuple[PolicyVersion, Path]:
    """Write a file under another name, then give it that of the version that its digest makes."""
    make_folder(folder)
    for leftover in folder.glob(".*.safetensors.*.partial"):
        leftover.unlink(missing_ok=True)
    partial = folder / f".weights.safetensors.{os.getpid()}.partial"
    forms = [tensor_form(name, tensor) for name, tensor in tensors.items()]
    data = {name: bytes_of(tensor) for name, tensor in tensors.items()}

    def labels(found: WeightsDigest) -> dict[str, str]:
        return policy_labels(version_of(found.whole), dtype, found)

    try:
        digest = write_digested(partial, forms, data, labels).whole
        version = version_of(digest)
        if not version.digest or not digest.startswith(version.digest):
            raise DataError(f"the tensors to be written are not those of policy version {version}: another digest.")
        path = weights_path(folder, version)
        fsync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync(folder)
    return version, path


def read_weights(
    path: str | Path, version: PolicyVersion, expected: Mapping[str, torch.Tensor], narrow: Collection[str] = ()
) -> CheckedTensors:
    """Return the tensors of the file, each of which has the name, shape and dtype of one in `expected`.

    In a file of weights that were rounded to bfloat16 they have that dtype, and are returned in the one expected, but
    for those in `narrow`, which stay as they are. They are copies: the file may go or change afterwards.

    Raises NotFoundError when there is no such file (it may have been pruned: ask for a newer version), DataError when
    it is damaged, belongs to another version or does not cover `expected` exactly.
    """
    path, where = Path(path), f"weights file {path}"
    if path.exists() and not path.is_file():
        raise DataError(f"{where} is no regular file.")
    file = read_raw(path)
    check_label(file, version, where)
    is_rounded = travels_rounded(file) == "bfloat16"
    dtypes = {name: _dtype_in(form, expected.get(name) if is_rounded else None) for name, form in file.forms.items()}
    found = {name: form_text(dtypes[name], form.shape) for name, form in file.forms.items()}
    wants = {name: form_text(tensor.dtype, tensor.shape) for name, tensor in expected.items()}
    check_forms(found, wants, [], where)
    if is_rounded:
        dtypes |= {name: _dtype_of(file.forms[name]) for name in narrow}
    widen = {name for name, dtype in dtypes.items() if dtype != _dtype_of(file.forms[name])}
    at_once = {name for name in widen if dtypes[name] == torch.float32}
    tensors = allocate(
        {
            name: (tensor.shape, torch.bfloat16 if name in widen - at_once else dtypes[name])
            for name, tensor in expected.items()
        }
    )
    targets = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    digest, infinite = copy_checked(file, targets, widen=at_once)
    check_content(file, digest, version, where)
    check_forms(found, wants, infinite, where)
    return CheckedTensors({name: tensor.to(dtypes[name]) for name, tensor in tensors.items()})


def _dtype_of(form: TensorForm) -> torch.dtype:
    found: torch.dtype = getattr(torch, DTYPES[form.dtype][0])
    return found


def _dtype_in(form: TensorForm, expected: torch.Tensor | None) -> torch.dtype:
    """Return the dtype that a tensor of a file is returned in; `expected`: what it may have been rounded from."""
    if form.dtype == "BF16" and expected is not None and is_wide(expected):
        return expected.dtype
    return _dtype_of(form)


def travel_dtype(path: str | Path) -> str:
    """Return what the weights of a file that `write_weights` made were rounded to; float32: they were not."""
    return travels_rounded(read_raw(Path(path)))


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
