"""Digests weights: BLAKE3 over the digests of all tensors, read in pieces on threads. No torch.

    piece    BLAKE3 of `PIECE_BYTES` of a tensor's bytes, or of what is left of them
    tensor   BLAKE3 of its label (name, dtype and shape, see `label`) and its pieces' digests, in order
    weights  "k", then the BLAKE3 of all tensors' digests, in the order of the tensors' names: 64 hex digits

The "k" names this form, so that a later form can be distinguished from it. Guarantees that the digest depends on names,
dtypes, shapes and bytes alone, whatever the number of threads.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Self, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

__all__ = [
    "DIGEST_LENGTH",
    "PIECE_BYTES",
    "Bytes",
    "Piece",
    "RunningDigest",
    "WeightsDigest",
    "digest_in_order",
    "digest_of_pieces",
    "hash_bytes",
    "label",
    "on_threads",
    "pieces_of",
]

Bytes = NDArray[np.uint8]

DIGEST_LENGTH = 13
"""Characters of the digest that a policy version carries: the letter of its form and 12 hex digits."""
PIECE_BYTES = 1 << 20
"""Bytes of a tensor that are digested together. It is part of the form: another size makes other digests."""
_LETTER = "k"
"""Names the form. No hex digit."""
_MAX_THREADS = 16
_MAX_PIECES_BEHIND = 64
_INLINE_BYTES = 4 * PIECE_BYTES
"""Up to so many bytes no other thread is worth its start."""

A = TypeVar("A")
R = TypeVar("R")


class Piece(NamedTuple):
    """Bytes `start` to `end` of the tensor `name`, its piece `number`."""

    name: str
    number: int
    start: int
    end: int


class WeightsDigest(NamedTuple):
    """The digest of weights, `whole`, and those of the tensors, by name in order."""

    whole: str
    of_tensors: Mapping[str, bytes]


def label(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return what a tensor's digest covers beside its bytes; `dtype` as torch writes it ("torch.float32")."""
    return f"{name}\0{dtype}\0{shape}\0".encode()


def pieces_of(name: str, size: int) -> list[Piece]:
    """Return the pieces of a tensor of `size` bytes; one without bytes has none."""
    count = math.ceil(size / PIECE_BYTES)
    return [Piece(name, i, i * PIECE_BYTES, min(size, (i + 1) * PIECE_BYTES)) for i in range(count)]


def hash_bytes(data: bytes | memoryview) -> bytes:
    """Return the hash that pieces and what lies above them are digested with."""
    return blake3(data).digest()


def on_threads(work: Callable[[A], R], items: list[A], total_bytes: int, *, threads_each: int = 1) -> list[R]:
    """Return `work` of each item, in order, from as many threads as `total_bytes` in all are worth.

    `threads_each`: how many `work` takes by itself.
    """
    count = max(1, _threads() // threads_each)
    if total_bytes <= _INLINE_BYTES or count == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(count, "weights") as pool:
        return list(pool.map(work, items))


def digest_of_pieces(labels: Mapping[str, bytes], digests: Mapping[Piece, bytes]) -> WeightsDigest:
    """Return the digest of weights from those of all their pieces. `labels`: of every tensor, by name."""
    of_pieces: dict[str, list[tuple[int, bytes]]] = {name: [] for name in labels}
    for piece, digest in digests.items():
        of_pieces[piece.name].append((piece.number, digest))
    of_tensors = {
        name: hash_bytes(b"".join((of_label, *(digest for _, digest in sorted(of_pieces[name])))))
        for name, of_label in sorted(labels.items())
    }
    return WeightsDigest(_LETTER + hash_bytes(b"".join(of_tensors.values())).hex(), of_tensors)


def digest_in_order(tensors: Iterable[tuple[str, bytes, Bytes]]) -> WeightsDigest:
    """Return the digest of tensors that come in the order of their names.

    Each comes with its name, label and bytes. At most two of them are held at a time.
    """
    labels: dict[str, bytes] = {}
    digests: dict[Piece, bytes] = {}
    with _lazy_pool() as submit:
        waiting: deque[tuple[list[Piece], Iterator[bytes]]] = deque()
        for name, of_label, data in tensors:
            labels[name] = of_label
            pieces = pieces_of(name, data.size)
            waiting.append((pieces, submit(data, pieces)))
            if len(waiting) > 1:
                digests.update(zip(*waiting.popleft(), strict=True))
        for pieces, found in waiting:
            digests.update(zip(pieces, found, strict=True))
    return digest_of_pieces(labels, digests)


class RunningDigest:
    """The digest of tensors whose bytes come block by block: it is computed on threads behind them.

    `sizes`: the tensors' bytes by name, in the order in which they come; `labels` as `digest_of_pieces`. Each block is
    of one tensor, and whole pieces unless it is that tensor's last. Blocks are not to change afterwards.
    """

    def __init__(self, sizes: Mapping[str, int], labels: Mapping[str, bytes]) -> None:
        self._labels = labels
        self._pieces = iter([piece for name, size in sizes.items() for piece in pieces_of(name, size)])
        self._waiting: deque[tuple[Piece, Future[bytes]]] = deque()
        self._digests: dict[Piece, bytes] = {}
        self._pool = ThreadPoolExecutor(_threads(), "weights")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def update(self, block: Bytes) -> None:
        """Take in the next block. Waits where too much is behind."""
        for at in range(0, block.size, PIECE_BYTES):
            part = block[at : at + PIECE_BYTES]
            self._waiting.append((next(self._pieces), self._pool.submit(hash_bytes, part.data)))
        while len(self._waiting) > _MAX_PIECES_BEHIND:
            self._collect()

    def digest(self) -> WeightsDigest:
        """Return the digest, once all blocks have come."""
        while self._waiting:
            self._collect()
        return digest_of_pieces(self._labels, self._digests)

    def _collect(self) -> None:
        piece, found = self._waiting.popleft()
        self._digests[piece] = found.result()


@contextmanager
def _lazy_pool() -> Iterator[Callable[[Bytes, list[Piece]], Iterator[bytes]]]:
    """Yield what digests a tensor's pieces: small tensors here, large ones on threads that start with the first."""
    pool: ThreadPoolExecutor | None = None

    def submit(data: Bytes, pieces: list[Piece]) -> Iterator[bytes]:
        nonlocal pool

        def digest(piece: Piece) -> bytes:
            return hash_bytes(data[piece.start : piece.end].data)

        if data.size <= _INLINE_BYTES:
            return iter([digest(piece) for piece in pieces])
        pool = pool or ThreadPoolExecutor(_threads(), "weights")
        futures: list[Future[bytes]] = [pool.submit(digest, piece) for piece in pieces]
        return (future.result() for future in futures)

    try:
        yield submit
    finally:
        if pool is not None:
            pool.shutdown()


def _threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
