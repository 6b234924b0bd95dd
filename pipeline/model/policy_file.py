"""Labels a policy's weights file, and checks that a file matches its policy version.

Guarantees that a file with an altered byte never passes, and that the error names the altered tensors as far as the
file shows: it records the beginnings of its tensors' digests. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from lachesis.pipeline.model.digest import DIGEST_LENGTH, WeightsDigest, hash_bytes
from lachesis.pipeline.model.faults import some
from lachesis.pipeline.model.safetensors_files import RawFile, raw_digest
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion

__all__ = ["check_content", "check_file", "check_label", "policy_labels", "travels_rounded"]

_POLICY_VERSION = "policy_version"
_ROUNDED_TO = "rounded_to"
"""Label of a file whose floating-point tensors were rounded."""
_DIGESTS = "digests"
"""Label with the beginnings of the tensors' digests, in the order of their names, and that of the other labels'."""
_HEX_DIGITS = 16
"""Of each digest."""


def policy_labels(version: PolicyVersion, dtype: str, found: WeightsDigest) -> dict[str, str]:
    """Return the metadata of a policy's file.

    `dtype`: what wider tensors were rounded to; float32: they were not. The metadata takes as many bytes for one digest
    as for any other of the same tensors.
    """
    labels = {_POLICY_VERSION: str(version)}
    if dtype != "float32":
        labels[_ROUNDED_TO] = dtype
    return labels | {_DIGESTS: _digests(labels, found)}


def travels_rounded(file: RawFile) -> str:
    """Return what the file's weights were rounded to; float32: they were not."""
    return file.metadata.get(_ROUNDED_TO, "float32")


def check_label(file: RawFile, version: PolicyVersion, where: str) -> None:
    """Raise `DataError` unless the file says that it is of `version`."""
    label = file.metadata.get(_POLICY_VERSION)
    if label != str(version):
        raise DataError(f"{where} holds policy version {label!r}, not {str(version)!r}.")


def check_content(file: RawFile, found: WeightsDigest, version: PolicyVersion, where: str) -> None:
    """Raise `DataError` unless a file, whose tensors have the digest `found`, is that of `version`."""
    recorded = file.metadata.get(_DIGESTS)
    if not version.digest or not found.whole.startswith(version.digest):
        raise DataError(
            f"{where}: its tensors have digest {found.whole[:DIGEST_LENGTH]}, but policy version {version} was "
            f"requested{_altered(found, recorded)}."
        )
    if recorded != _digests(file.metadata, found) or not file.is_canonical:
        raise DataError(f"{where} was altered: its header, or what follows its tensors, is not what was written.")


def check_file(file: RawFile, version: PolicyVersion, where: str) -> None:
    """Read a file and raise `DataError` unless it is what was written of `version`."""
    check_label(file, version, where)
    check_content(file, raw_digest(file), version, where)


def _altered(found: WeightsDigest, recorded: str | None) -> str:
    """Say which tensors are not those whose digests the file has recorded."""
    if recorded is None or len(recorded) != _HEX_DIGITS * (1 + len(found.of_tensors)):
        return ""
    pairs = zip(range(0, len(recorded), _HEX_DIGITS), found.of_tensors.items(), strict=False)
    names = [name for at, (name, one) in pairs if _beginning(one) != recorded[at : at + _HEX_DIGITS]]
    return f": the file is damaged in {some(names)}" if names else ""


def _digests(labels: Mapping[str, str], found: WeightsDigest) -> str:
    others = "".join(f"{name}\0{label}\0" for name, label in sorted(labels.items()) if name != _DIGESTS)
    own = hash_bytes(others.encode("utf-8", "surrogatepass"))
    return "".join(map(_beginning, [*found.of_tensors.values(), own]))


def _beginning(digest: bytes) -> str:
    return digest.hex()[:_HEX_DIGITS]
