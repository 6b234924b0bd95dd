"""Fetches a policy's weights, so that an inference server can read them as a file.

For a policy record it returns the path of the file: the record's own, or one in `folder` that is made from the run's
stream WEIGHTS. All processes of a machine share the folder, so the bytes are fetched once: one process at a time
fetches, and those that wait find the file. Guarantees: a file under its final name has the digest of its version, which
is computed while it is written; an interrupted download continues where it was; if the base of a difference is missing
or damaged, the newest whole version and all differences since are fetched instead. No torch here.
"""

import fcntl
import hashlib
import logging
import math
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.common.fsync import fsync, make_folder
from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.pipeline.model.policy_file import check_content, check_file, policy_labels
from lachesis.pipeline.model.safetensors_files import read_raw, weights_path, write_blocks
from lachesis.pipeline.weights.checked_files import CheckedFiles
from lachesis.pipeline.weights.payload import RawTensors, decode_payload, forms_of
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.subjects import WEIGHTS
from lachesis.schemas.weights import WEIGHTS_CHUNK_BYTES, WeightsHead, head_seq

__all__ = ["FETCHED", "WeightsReceiver"]

log = logging.getLogger("lachesis")

FETCHED = "fetched"
"""Folder, inside that of a run's weights, into which all services of a machine fetch."""
_FILES_KEPT = 3
"""Versions kept in the folder: the newest, and those that a slower server or the evaluator may be about to read."""
_POLL_S = 0.05
_SILENT_S = 10.0
"""Seconds of waiting for another process after which the log says so."""
_PARTIAL = ".partial"


class WeightsReceiver:
    """`path_of` gives the file of each policy record. Only receivers write to `folder`."""

    def __init__(self, bus: Bus, run: str, folder: Path) -> None:
        self._bus = bus
        self._run = run
        self._folder = folder
        self._checked = CheckedFiles(folder)

    async def path_of(self, record: PolicyRecord) -> str:
        """Return the path of a file with the record's weights, once it is here: another process may fetch it.

        Raises `NotFoundError` if they have expired (a newer record follows), `DataError` if they are not what the
        record says, `InfrastructureError` if the server is unavailable.
        """
        seq = head_seq(record.weights)
        if seq is None:
            return record.weights
        make_folder(self._folder)
        async with _alone_in(self._folder):
            path = weights_path(self._folder, record.policy_version)
            if not await anyio.to_thread.run_sync(self._is_sound, path, record.version):
                await self._fetch(seq, record.version)
            await anyio.to_thread.run_sync(_prune, self._folder, path)
        return str(path)

    def _is_sound(self, path: Path, version: str) -> bool:
        """Return whether the file of `version` is here; delete a wrong one. All processes together read it once."""
        if path in self._checked:
            return True
        sound = _is_sound(path, version)
        if sound:
            self._checked.add(path)
        else:
            path.unlink(missing_ok=True)
        return sound

    async def _fetch(self, seq: int, version: str) -> None:
        """Make the file of `version`, from the newest file here that leads to it or else from a whole version."""
        steps = await self._steps_to(seq, version)
        try:
            await self._make(steps)
        except DataError as error:
            base = steps[0][1].base
            if base is None:
                raise
            log.warning("%s; its base is fetched again", error)  # it may have been damaged since it was checked
            weights_path(self._folder, PolicyVersion.parse(base)).unlink(missing_ok=True)
            await self._make(await self._steps_to(seq, version))

    async def _make(self, steps: list[tuple[int, WeightsHead]]) -> None:
        for place, head in steps:
            base = None if head.base is None else weights_path(self._folder, PolicyVersion.parse(head.base))
            payload = await self._download(place, head)
            target = weights_path(self._folder, PolicyVersion.parse(head.version))
            decoded = partial(_write_version, payload, head, base, target, last=place == steps[-1][0])
            await write_when_room(target, decoded, needed_bytes=head.plain_size)
            await anyio.to_thread.run_sync(self._checked.add, target)
            payload.unlink()

    async def _steps_to(self, seq: int, version: str) -> list[tuple[int, WeightsHead]]:
        """Return the heads to decode one after the other, oldest first, with their sequences."""
        steps: list[tuple[int, WeightsHead]] = []
        while True:
            message = await self._bus.get(WEIGHTS, seq)
            head = decode(WeightsHead, message.data)
            if message.subject != subjects.weights_heads(self._run) or head.version != version:
                raise DataError(f"message {seq} of WEIGHTS does not hold the weights of policy {version}")
            steps.append((seq, head))
            if head.base is None or head.previous is None:
                return steps[::-1]
            base = weights_path(self._folder, PolicyVersion.parse(head.base))
            if await anyio.to_thread.run_sync(self._is_sound, base, head.base):
                return steps[::-1]
            seq, version = head.previous, head.base

    async def _download(self, place: int, head: WeightsHead) -> Path:
        """Fetch a version's chunks into a file, after those that it already has."""
        path = self._folder / f".{place}-{head.sha256.hex()[:16]}{_PARTIAL}"
        for leftover in self._folder.glob(f".*{_PARTIAL}"):
            if leftover != path:
                leftover.unlink()
        done = min(path.stat().st_size // WEIGHTS_CHUNK_BYTES, len(head.chunks)) if path.exists() else 0
        if done:
            log.info("going on with the weights of policy %s: %d of %d chunks", head.version, done, len(head.chunks))
        subject = subjects.weights_chunks(self._run)
        async with aclosing(self._bus.fetch(WEIGHTS, head.chunks[done:], subject)) as chunks:
            async for chunk in chunks:
                write = partial(_write_chunk, path, done * WEIGHTS_CHUNK_BYTES, chunk.data)
                await write_when_room(path, write, needed_bytes=len(chunk.data))
                done += 1
        await anyio.to_thread.run_sync(_check_payload, path, head)
        return path


@asynccontextmanager
async def _alone_in(folder: Path) -> AsyncIterator[None]:
    """Wait until no other process fetches into `folder`, and keep others out meanwhile.

    The lock is released however its process ends.
    """
    silent_until = anyio.current_time() + _SILENT_S
    with (folder / ".lock").open("wb") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await anyio.sleep(_POLL_S)  # a wait in the kernel could not be cancelled
            if anyio.current_time() > silent_until:
                silent_until = math.inf
                log.warning("waiting for another process that fetches weights into %s", folder)
        yield


def _write_chunk(path: Path, offset: int, data: bytes) -> None:
    """Write a chunk at its place, over anything that a failed write left there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - of a descriptor
        file.truncate(offset)
        file.seek(offset)
        file.write(data)


def _check_payload(path: Path, head: WeightsHead) -> None:
    """Raise `InfrastructureError` unless the file matches the head; then it is fetched again."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    if digest != head.sha256 or path.stat().st_size != head.size:
        path.unlink()
        raise InfrastructureError(f"the chunks of policy {head.version} are not what was stored; fetching them again")


def _write_version(payload: Path, head: WeightsHead, base: Path | None, target: Path, *, last: bool) -> None:
    """Decode a payload into the file of its version. Raises `DataError` if it does not have the version's digest."""
    partial_path = target.with_name(f".{target.name}{_PARTIAL}")
    version = PolicyVersion.parse(head.version)
    before = None
    if base is not None:
        found = read_raw(base)
        before = RawTensors(found.forms, found.data)
    try:
        coded = np.memmap(payload, np.uint8, "r").data
        forms, _ = forms_of(coded)
        if sum(form.nbytes for form in forms) != head.plain_size:
            raise DataError(f"the weights of policy {head.version} are not as large as their head says")
        digest = write_blocks(
            partial_path,
            forms,
            decode_payload(coded, before),
            partial(policy_labels, version, head.dtype),
        )
        check_content(read_raw(partial_path), digest, version, f"the decoded weights of policy {head.version}")
        if last:
            fsync(partial_path)
        partial_path.replace(target)
    finally:
        partial_path.unlink(missing_ok=True)
    if last:
        fsync(target.parent)


def _is_sound(path: Path, version: str) -> bool:
    """Return whether a file holds `version`, byte for byte."""
    try:
        check_file(read_raw(path), PolicyVersion.parse(version), str(path))
    except (DataError, NotFoundError):
        return False
    return True


def _prune(folder: Path, newest: Path) -> None:
    others = sorted(
        (path for path in folder.glob("[!.]*.safetensors") if path != newest), key=lambda path: path.stat().st_mtime_ns
    )
    for path in others[: len(others) - (_FILES_KEPT - 1)]:
        path.unlink(missing_ok=True)
