"""Copies a policy's weights out of the trainer's segment of memory, for the reference server.

Guarantees that the copy is of one version, to the bit: the trainer cannot change the weights while they are copied. On
one GPU the copy stays within its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lachesis.pipeline.model.replace_tensors import CheckedTensors
from lachesis.pipeline.model.segment_layout import rope_of
from lachesis.pipeline.model.shared_memory import SegmentReader, read_pointer
from lachesis.pipeline.model.tensors import check_coverage, matches
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion

__all__ = ["SharedCopy"]


class SharedCopy:
    """`config`: of the model that is served. `expected`: names, shapes and dtypes of its tensors."""

    def __init__(self, config: Any, expected: Mapping[str, torch.Tensor]) -> None:
        self._rope = rope_of(config)
        self._expected = expected
        self._reader: SegmentReader | None = None

    def read(self, pointer: Path, version: PolicyVersion) -> CheckedTensors:
        """Return a copy of the tensors, where the segment has them.

        Raises `DataError` or `NotFoundError` when the segment does not hold `version`, or is of another model.
        """
        reader = self._reader
        known = reader is not None and reader.pointer == read_pointer(pointer)
        if reader is None or not known:
            reader = SegmentReader(pointer)
        where = f"the shared memory of generation {reader.generation[:8]}"
        changes = reader.check_version(version)
        with reader.reading() as (now, _):
            if now != changes:
                raise DataError(f"the trainer changes the weights in {where}; its next version follows.")
            if not known:
                self._check(reader, version, where)
            copied = {name: tensor.clone() for name, tensor in reader.tensors.items()}
            if reader.on_gpu:
                for device in {tensor.device for tensor in copied.values()}:
                    torch.cuda.synchronize(device)  # what was only queued reads the weights after this
                if not reader.is_alive():
                    raise DataError(f"the trainer of {where} has ended; its next start shares its weights again.")
        check_coverage(copied, self._expected, where)
        self._reader = reader
        return CheckedTensors(copied)

    def _check(self, reader: SegmentReader, version: PolicyVersion, where: str) -> None:
        if reader.header.rope != self._rope:
            raise DataError(
                f"{where} is of a model with the rotary embedding {reader.header.rope}, the server was started with "
                f"{self._rope}: give it the model that is trained."
            )
        if not matches(reader.tensors, version):
            raise DataError(f"{where} does not have the digest of policy version {version}.")
