"""Stores a policy's weights in the run's stream WEIGHTS, and lets old versions expire.

It stores a version's tensors and returns their location for the policy record. A chain is a version without a base and
the versions that build on it. Guarantees:

* a head is stored only after all of its chunks;
* only one process writes; a process that has taken over fences the earlier one;
* a trainer that starts again begins with a whole version;
* the stream stays within its budget; only whole chains are deleted, the oldest first. The newest chain is deleted only
  if the budget has no room for another version beside it: a server that needs it then waits for the version that is
  being stored.
"""

import hashlib
import logging
import secrets
from collections.abc import Mapping
from typing import NamedTuple

import anyio.to_thread
import torch

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.errors import InfrastructureError, NotFoundError, StreamFullError
from lachesis.pipeline.model.tensors import bytes_of, tensor_form
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.pipeline.weights.payload import RawTensors, encode_payload
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.subjects import WEIGHTS
from lachesis.schemas.weights import WEIGHTS_CHUNK_BYTES, WeightsHead, weights_location

__all__ = ["STREAM_SHARE", "SentWeights", "WeightsUploader", "raw_tensors"]

log = logging.getLogger("lachesis")

STREAM_SHARE = 0.97
"""Share of the budget that weights may take; the rest is for the server's own bookkeeping."""
_CHUNK_OVERHEAD_BYTES = 512


class SentWeights(NamedTuple):
    """Location of weights for the policy record; how many bytes travel, of how many; whether they build on a base."""

    location: str
    size: int
    plain_size: int
    is_delta: bool


class _Payload(NamedTuple):
    data: bytes
    sha256: bytes
    is_delta: bool


def raw_tensors(tensors: Mapping[str, torch.Tensor]) -> RawTensors:
    """Return the tensors' bytes: their own memory, or copies if not contiguous or on a GPU."""
    forms = {name: tensor_form(name, tensor) for name, tensor in tensors.items()}
    return RawTensors(forms, {name: bytes_of(tensor) for name, tensor in tensors.items()})


class WeightsUploader:
    """Call `send` for each version, in order. `kept`: the newest versions that stay, as far as `budget` bytes allow."""

    def __init__(self, bus: Bus, run: str, config: WeightsConfig, *, budget: int, kept: int) -> None:
        self._bus = bus
        self._run = run
        self._config = config
        self._budget = int(budget * STREAM_SHARE)
        self._kept = kept
        self._chunk_seq: int | None = None  # of the last chunk; None: not looked up yet
        self._head_seq = 0
        self._chains: list[int] = []  # of the newest versions, oldest first: where the chain of each begins
        self._base: tuple[PolicyVersion, RawTensors] | None = None

    async def send(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> SentWeights:
        """Store a version.

        The tensors must not change before the next version was sent, which may be stored as its difference to them.
        Raises `InfrastructureError` if the caller should retry (no record refers to a version stored in part),
        `FencedError` if another trainer has taken over, `ConfigError` if no version fits the budget.
        """
        if self._chunk_seq is None:
            await self._find_position()
        raw = await anyio.to_thread.run_sync(raw_tensors, tensors)
        payload = await anyio.to_thread.run_sync(self._encode, raw, self._base_for(raw))
        if payload.is_delta and not await self._make_room(len(payload.data), keep_newest=True):
            payload = await anyio.to_thread.run_sync(self._encode, raw, None)
        if not payload.is_delta:
            await self._make_room(len(payload.data), keep_newest=False)
        try:
            head = await self._store(version, raw.nbytes, payload)
        except InfrastructureError as error:
            full = isinstance(error, StreamFullError)  # then the next attempt has the whole budget
            await self._begin_anew(free=full)
            raise
        self._base = version, raw
        self._chains.append(head.chain)
        return SentWeights(weights_location(self._head_seq), head.size, head.plain_size, payload.is_delta)

    def forget(self) -> None:
        """Store the next version whole."""
        self._base = None

    async def expire(self) -> None:
        """Delete chains that are needed only by versions older than the newest `kept`."""
        self._chains = self._chains[-self._kept :]
        if self._chains:
            await self._trim(self._chains[0])

    async def _find_position(self) -> None:
        """Find what is stored already, also by a trainer before this one."""
        last_chunk = await self._bus.last(WEIGHTS, subjects.weights_chunks(self._run))
        message = await self._bus.last(WEIGHTS, subjects.weights_heads(self._run))
        self._head_seq = 0 if message is None else message.seq
        chains: list[int] = []
        try:
            while message is not None and len(chains) < self._kept:
                head = decode(WeightsHead, message.data)
                chains.append(head.chain)
                message = None if head.previous is None else await self._bus.get(WEIGHTS, head.previous)
        except NotFoundError:
            pass  # expired
        except SchemaError as error:
            log.warning("WEIGHTS holds a head that cannot be read, and what lies before it goes first: %s", error)
        self._chains = chains[::-1]
        self._chunk_seq = 0 if last_chunk is None else last_chunk.seq

    def _base_for(self, raw: RawTensors) -> RawTensors | None:
        """Return the version before this one, if this one may build on it."""
        if self._base is None or self._base[1].forms != raw.forms or not self._chains:
            return None
        length = sum(chain == self._chains[-1] for chain in self._chains)
        return None if length >= self._config.full_every else self._base[1]

    def _encode(self, raw: RawTensors, base: RawTensors | None) -> _Payload:
        data = b"".join(encode_payload(raw, base))
        return _Payload(data, hashlib.sha256(data).digest(), base is not None)

    async def _make_room(self, size: int, *, keep_newest: bool) -> bool:
        """Delete the oldest chains until `size` more bytes fit.

        Return False when only the newest chain is left, `keep_newest` is set and they do not fit.
        """
        needed = size + _CHUNK_OVERHEAD_BYTES * (2 + size // WEIGHTS_CHUNK_BYTES)
        if needed + 2 * WEIGHTS_CHUNK_BYTES > self._budget:
            raise ConfigError(
                f"streams.weights_bytes: a version of the weights takes {needed} bytes, more than fits: set it to "
                f"{3 * needed} or more, or weights.dtype to bfloat16"
            )
        while (await self._bus.usage(WEIGHTS)).bytes + needed > self._budget:
            newest = self._chains[-1] if self._chains else None
            later = [chain for chain in self._chains if chain > self._chains[0]]
            if later:
                self._chains = later
                await self._trim(later[0])
            elif newest is not None and await self._trim(newest):
                continue  # rest of an interrupted upload
            elif keep_newest:
                return False
            else:
                await self._trim((await self._bus.usage(WEIGHTS)).last + 1)
                self._chains = []
                break
        return True

    async def _trim(self, before: int) -> int:
        return await self._bus.trim(WEIGHTS, list(subjects.weights_subjects(self._run)), before=before)

    async def _store(self, version: PolicyVersion, plain_size: int, payload: _Payload) -> WeightsHead:
        chunks: list[int] = []
        attempt = secrets.token_hex(8)
        for start in range(0, len(payload.data), WEIGHTS_CHUNK_BYTES):
            self._chunk_seq = await self._bus.commit(
                subjects.weights_chunks(self._run),
                payload.data[start : start + WEIGHTS_CHUNK_BYTES],
                expected=self._chunk_seq or 0,
                msg_id=f"{version}/{attempt}/{len(chunks)}",
            )
            chunks.append(self._chunk_seq)
        head = WeightsHead(
            run=self._run,
            version=str(version),
            base=str(self._base[0]) if payload.is_delta and self._base else None,
            dtype=self._config.dtype,
            chunks=chunks,
            size=len(payload.data),
            plain_size=plain_size,
            sha256=payload.sha256,
            previous=self._head_seq or None,
            chain=self._chains[-1] if payload.is_delta else chunks[0],
        )
        self._head_seq = await self._bus.commit(
            subjects.weights_heads(self._run),
            encode(head),
            expected=self._head_seq,
            msg_id=f"{version}/{attempt}/head",
        )
        return head

    async def _begin_anew(self, *, free: bool) -> None:
        """Make the next attempt look up stored versions and send a whole one; `free`: delete all others first."""
        self._chunk_seq, self._base, self._chains = None, None, []
        if free:
            await self._trim((await self._bus.usage(WEIGHTS)).last + 1)
