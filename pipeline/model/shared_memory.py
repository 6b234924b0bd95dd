"""Keeps one copy of a policy's weights in memory, for the trainer and an inference server.

    0      magic, generation, count of changes, policy version    (fixed places, see below)
    256    JSON: `SegmentHeader`, the place of each tensor
    ...    the tensors, float32, in the layout that vLLM computes with

The segment is an anonymous file (memfd) of the trainer's process. If the model is on a GPU, the tensors are there, in
memory that CUDA shares, and the file has the rest. A pointer file in the run's folder names the segment. Guarantees:
the kernel frees the memory with the last process that uses it, however that ends, so nothing is left behind and no
stale segment is ever found under a name; its size cannot change; readers cannot write; and changing weights can be
distinguished from weights at rest: during a change the count of changes is odd, a lock keeps readers out, and the
version is empty until the next one is published. Runs inside vLLM's process too: torch and msgspec are all it needs.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from lachesis.pipeline.common.private_file import write_private
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.model import cuda_memory
from lachesis.pipeline.model.cuda_memory import CudaMemory
from lachesis.pipeline.model.segment_layout import SegmentTensor, place_tensors, rope_of
from lachesis.pipeline.model.tensors import has_adapters, policy_tensors
from lachesis.schemas.errors import ConfigError, DataError, SchemaError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.values import from_json

__all__ = ["POINTER_FILE", "SegmentPointer", "SegmentReader", "WeightSegment", "read_pointer", "segment_pointer"]

POINTER_FILE = "shared_memory.json"
"""Name of the pointer in the folder of weights."""
_MAGIC = b"LACHWTS1"
_STATE = struct.Struct("<8s32sQ128sI")
"""Magic, generation in hex, count of changes, policy version, bytes of the header."""
_CHANGES = struct.Struct("<Q")
_CHANGES_AT, _VERSION_AT, _VERSION_BYTES, _HEADER_AT = 40, 48, 128, 256
_PROC_FILE = re.compile(r"/proc/[1-9][0-9]*/fd/[0-9]+")


class SegmentHeader(msgspec.Struct, frozen=True):
    """What lies where. `rope`: the trainer's rotary embedding, which is no tensor and yet part of the model.

    `cuda`: the memory that the tensors are in; None: in the file, behind the header.
    """

    tensors: list[SegmentTensor]
    rope: dict[str, Any]
    cuda: CudaMemory | None = None


class SegmentPointer(msgspec.Struct, frozen=True):
    """Where the segment of a run is: a path below /proc, and the generation that must be found there."""

    path: str
    generation: str


def segment_pointer(folder: Path) -> Path:
    """Return the file in the folder of weights that says where the segment is."""
    return folder / POINTER_FILE


class WeightSegment:
    """The trainer's side: owns the memory that the parameters of its model are in."""

    def __init__(self, fd: int, memory: mmap.mmap, generation: str, device: torch.device) -> None:
        self._fd = fd
        self._memory = memory
        self._device = device
        self.generation = generation

    @classmethod
    def share(cls, model: Any) -> WeightSegment:
        """Move the parameters of `model` into a new segment; the optimizer goes on changing them there.

        Raises `ConfigError` when the model is not on one device, not in float32, or has adapters, whose merged weights
        are copies. Raises `DataError` when a tensor of the model is left outside.
        """
        if has_adapters(model):
            raise ConfigError('weights.transport = "shared_memory" shares all weights: leave training.lora out')
        tensors = policy_tensors(model)
        device = next(iter(tensors.values())).device
        unfit = [
            f"{name} is {tensor.dtype} on {tensor.device}"
            for name, tensor in tensors.items()
            if tensor.dtype != torch.float32 or tensor.device != device
        ]
        if unfit:
            raise ConfigError(
                'weights.transport = "shared_memory" takes float32 on one device, but ' + ", ".join(unfit[:5])
            )
        places, size = place_tensors(tensors, getattr(model.config, "vocab_size", 0))
        on_gpu = cuda_memory.allocate(size, device) if _is_gpu(device) else None
        cuda = None if on_gpu is None else cuda_memory.exported(on_gpu)
        header = msgspec.json.encode(SegmentHeader(places, rope_of(model.config), cuda))
        start = -(-(_HEADER_AT + len(header)) // mmap.PAGESIZE) * mmap.PAGESIZE
        generation = secrets.token_hex(16)
        fd = os.memfd_create(f"lachesis-weights-{generation[:8]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, start + (size if on_gpu is None else 0))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(fd, 0)
        _STATE.pack_into(memory, 0, _MAGIC, generation.encode(), 0, b"", len(header))
        memory[_HEADER_AT : _HEADER_AT + len(header)] = header
        flat = _behind(memory, start) if on_gpu is None else on_gpu
        _move(model, tensors, _views(flat, places))
        _check_moved(model, flat)
        return cls(fd, memory, generation, device)

    @property
    def pointer(self) -> SegmentPointer:
        """Where other processes of the same user find it while this process lives."""
        return SegmentPointer(f"/proc/{os.getpid()}/fd/{self._fd}", self.generation)

    def announce(self, folder: Path) -> None:
        """Write the pointer file into the folder of weights."""
        folder.mkdir(parents=True, exist_ok=True)
        write_private(segment_pointer(folder), msgspec.json.encode(self.pointer).decode())

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the weights in this context alone.

        No reader computes meanwhile, and none computes with the changed weights before `publish` names them.

        After a `DataError` the weights count as whole, as the learner leaves them; after another error as torn.
        """
        with _lock(self._fd, fcntl.LOCK_EX):
            self._set_version("")
            self._count()
            try:
                yield
            except DataError:
                self._finish()
                raise
            self._finish()

    def publish(self, version: PolicyVersion) -> None:
        """Say of which version the weights are, as they lie there."""
        with _lock(self._fd, fcntl.LOCK_EX):
            self._set_version(str(version))

    def close(self, folder: Path) -> None:
        """Take the pointer back, and let no other process open the segment.

        The memory stays as long as somebody uses it.
        """
        pointer = segment_pointer(folder)
        with suppress(NotFoundError, DataError):
            if read_pointer(pointer) == self.pointer:
                pointer.unlink()
        os.close(self._fd)

    def _finish(self) -> None:
        """Count the change once all of it is there: a GPU works behind."""
        if _is_gpu(self._device):
            torch.cuda.synchronize(self._device)
        self._count()

    def _count(self) -> None:
        (changes,) = _CHANGES.unpack_from(self._memory, _CHANGES_AT)
        _CHANGES.pack_into(self._memory, _CHANGES_AT, changes + 1)

    def _set_version(self, version: str) -> None:
        encoded = version.encode()
        if len(encoded) > _VERSION_BYTES:
            raise ValueError(f"policy version {version} is longer than {_VERSION_BYTES} bytes")
        self._memory[_VERSION_AT : _VERSION_AT + _VERSION_BYTES] = encoded.ljust(_VERSION_BYTES, b"\0")


class SegmentReader:
    """A server's side: `tensors` are read-only views of the trainer's own weights."""

    def __init__(self, pointer_file: Path) -> None:
        """Open the segment that the pointer names.

        Raises `NotFoundError` when there is none, or its trainer is gone; `DataError` when the pointer leads to
        something else, as it does after another process has got the trainer's number.
        """
        self.pointer = read_pointer(pointer_file)
        where, trainer = f"the segment {self.pointer.path}", "the trainer that made it has ended"
        try:
            self._fd = os.open(self.pointer.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"{where} does not exist: {trainer}; its next start makes another.") from error
        except OSError as error:
            raise DataError(
                f"{where} cannot be opened: {error}; trainer and server must run as the same user of one machine."
            ) from error
        size = os.fstat(self._fd).st_size
        if size < _HEADER_AT:
            raise self._foreign(f"it has {size} bytes")
        self._memory = mmap.mmap(self._fd, size, prot=mmap.PROT_READ)
        magic, generation, _, _, header_bytes = _STATE.unpack_from(self._memory, 0)
        if magic != _MAGIC or generation.decode(errors="replace") != self.pointer.generation:
            raise self._foreign(f"it is of generation {generation.decode(errors='replace')[:8]!r}")
        self.header = from_json(where, SegmentHeader, self._memory[_HEADER_AT : _HEADER_AT + header_bytes])
        start = -(-(_HEADER_AT + header_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.on_gpu = self.header.cuda is not None
        self._flat = _behind(self._memory, start) if self.header.cuda is None else cuda_memory.opened(self.header.cuda)
        last = max((place.offset + place.reserved for place in self.header.tensors), default=0)
        if last > self._flat.nbytes:
            raise DataError(f"{where} has {self._flat.nbytes} bytes, but its header places tensors up to {last}.")
        self.places = {place.name: place for place in self.header.tensors}

    @property
    def generation(self) -> str:
        return self.pointer.generation

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, float32, without copies."""
        return _views(self._flat, self.header.tensors)

    def view(self, offset: int, shape: torch.Size) -> torch.Tensor:
        """Return the float32 tensor of `shape` at `offset`; it may span several tensors that lie side by side."""
        return _view(self._flat, offset, shape)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the segment."""
        return _contains(self._flat, tensor)

    def is_alive(self) -> bool:
        """Whether the memory is still there: in main memory always, on a GPU as long as the trainer's process."""
        if not self.on_gpu:
            return True
        try:
            there = Path(self.pointer.path).stat()
        except OSError:
            return False
        own = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)

    @contextmanager
    def reading(self) -> Iterator[tuple[int, str]]:
        """Keep the trainer from changing the weights.

        Yield the count of changes and the version that they have now.
        """
        with _lock(self._fd, fcntl.LOCK_SH):
            _, _, changes, version, _ = _STATE.unpack_from(self._memory, 0)
            yield changes, version.rstrip(b"\0").decode()

    def check_version(self, wanted: PolicyVersion) -> int:
        """Return the count of changes at which the weights are of version `wanted`.

        Raises `DataError` if they are not.

        The digest of the content is not computed here: see `weights_digest`.
        """
        with self.reading() as (changes, version):
            if changes % 2:
                raise DataError("the weights in shared memory are torn: their trainer ended while it changed them.")
            if version != str(wanted):
                raise DataError(f"shared memory holds policy version {version!r}, not {str(wanted)!r}.")
            return changes

    def _foreign(self, found: str) -> DataError:
        os.close(self._fd)
        return DataError(
            f"the segment {self.pointer.path} is not generation {self.pointer.generation[:8]!r}: {found}. Its trainer "
            "has ended; its next start makes another."
        )


def read_pointer(path: Path) -> SegmentPointer:
    """Read a pointer file.

    Raises `NotFoundError` when there is none, `DataError` when it names no file of a process.
    """
    try:
        pointer = from_json(str(path), SegmentPointer, read_small_file(path))
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist: no trainer of this run shares its weights.") from error
    except (OSError, SchemaError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not _PROC_FILE.fullmatch(pointer.path):
        raise DataError(f"{path} names {pointer.path!r}; a segment is an open file of a process, /proc/PID/fd/N.")
    return pointer


@contextmanager
def _lock(fd: int, kind: int) -> Iterator[None]:
    """Hold a lock of the file; the kernel releases it with the process."""
    fcntl.flock(fd, kind)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _behind(memory: mmap.mmap, start: int) -> torch.Tensor:
    """Return what lies in a mapped file from `start` on, uint8."""
    if start == len(memory):
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing here writes to it
        return torch.frombuffer(memory, dtype=torch.uint8, offset=start)


def _views(flat: torch.Tensor, places: list[SegmentTensor]) -> dict[str, torch.Tensor]:
    return {place.name: _view(flat, place.offset, torch.Size(place.shape)) for place in places}


def _view(flat: torch.Tensor, offset: int, shape: torch.Size) -> torch.Tensor:
    return flat[offset : offset + 4 * shape.numel()].view(torch.float32).view(shape)


def _move(model: Any, tensors: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor]) -> None:
    """Copy each tensor into its view, and let parameters and buffers, tied ones too, be those views."""
    new = {}
    for name, tensor in tensors.items():
        views[name].copy_(tensor.detach())
        new[tensor.data_ptr(), tensor.shape] = views[name]
    for held in {id(held): held for held in model.state_dict(keep_vars=True).values()}.values():
        held.data = new[held.data_ptr(), held.shape]


def _check_moved(model: Any, flat: torch.Tensor) -> None:
    outside = [name for name, tensor in model.state_dict(keep_vars=True).items() if not _contains(flat, tensor)]
    if outside:
        raise DataError(f"{len(outside)} tensors of the model are not in shared memory: {', '.join(outside[:5])}")


def _contains(flat: torch.Tensor, tensor: torch.Tensor) -> bool:
    first = flat.data_ptr()
    return (
        tensor.device == flat.device
        and first <= tensor.data_ptr()
        and tensor.data_ptr() + tensor.nbytes <= first + flat.nbytes
    )
