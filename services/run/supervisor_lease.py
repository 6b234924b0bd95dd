"""Lets one supervisor at a time run a run's services, by a lease in the run's bucket.

Guarantees: of two supervisors one is refused before it starts anything, with the name of the other. If the holder died,
its lease is taken over at once on the same machine or in the same folder, and elsewhere once it was not renewed for
`LEASE_TTL_S`. The waiting supervisor counts that time by its own clock and only while the server answers, so neither a
clock that is set nor an outage of the server ends a lease. A holder that lost its lease is notified, so that it stops
what it runs. A run whose deletion has begun is not run again: its lease, and a file in its folder, say so until the
deletion is finished.
"""

import fcntl
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import anyio

from lachesis.pipeline.bus.api import Bus, Entry
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import FencedError, InfrastructureError, NotFoundError, StartupError
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import SupervisorLease
from lachesis.schemas.errors import LachesisError, SchemaError
from lachesis.services.run.process_identity import is_running, machine_id, started_ticks

__all__ = [
    "DELETION_MARK",
    "LEASE_TTL_S",
    "LOCK_FILE",
    "RunLease",
    "lock_folder",
    "refuse_deleting",
    "refuse_half_deleted",
]

log = logging.getLogger("lachesis")

LOCK_FILE = ".lock"
"""In a run's folder: locked while a supervisor runs there, and holds a name that no other folder has."""
DELETION_MARK = ".deleting"
"""In a run's folder from the beginning of its deletion to the end."""
LEASE_TTL_S = 15.0
_RENEWALS = 5
"""Renewals within that time."""
_ASK_S = 2.0
_LOOK_S = 0.5
_RELEASE_S = 2.0
_ATTEMPTS = 10


class RunLease:
    """The lease of the run called `run` for this process, which holds the lock of the run's `folder`.

    Call `acquire`, then use `held`. `lost` is called when another supervisor has taken over. `deletes`: it is taken to
    delete the run, which one that was begun allows as well.
    """

    def __init__(
        self,
        bus: Bus,
        run: str,
        folder: Path,
        lost: Callable[[], None],
        *,
        ttl_s: float = LEASE_TTL_S,
        deletes: bool = False,
    ) -> None:
        self._bus = bus
        self._lost = lost
        self._deletes = deletes
        self._mine = SupervisorLease(
            run=run,
            host=socket.gethostname(),
            pid=os.getpid(),
            folder=str(folder.resolve()),
            folder_id=_folder_id(folder),
            machine=machine_id(),
            started=started_ticks(os.getpid()) or 0,
            ttl_s=ttl_s,
        )
        self._revision: int | None = None
        self._taken_by: SupervisorLease | None = None

    @property
    def is_held(self) -> bool:
        return self._revision is not None and self._taken_by is None

    async def acquire(self) -> None:
        """Take the lease. Raises StartupError that names the supervisor that has it."""
        for _ in range(_ATTEMPTS):
            entry = await self._bus.value(keys.SUPERVISOR)
            holder = self._read(entry)
            if entry is not None and holder is not None and not await self._is_free(holder, entry):
                continue
            with suppress(FencedError):  # another one was quicker
                self._revision = await self._write(self._mine, entry.revision if entry else 0)
                return
        raise StartupError(
            f"the lease of run {self._mine.run} changes whenever it is to be taken: start one supervisor, not several; "
            f"if there is no other, delete the key {keys.SUPERVISOR} of the bucket "
            f"{subjects.bucket_name(self._mine.run)}"
        )

    async def _is_free(self, holder: SupervisorLease, entry: Entry) -> bool:
        """Return whether the lease can be taken from `holder`; False: look again. Raises StartupError if it cannot."""
        if holder.deleting and not self._deletes:
            raise StartupError(_half_deleted(holder.run))
        if holder.released or self._is_predecessor(holder):
            return True
        runs = is_running(holder.machine, holder.pid, holder.started)
        if runs is False:
            return True
        if runs or await self._answers():
            raise StartupError(_refusal(holder))
        log.warning(
            "run %s was last run by a supervisor on %s (pid %d, folder %s), which does not answer: taking over in %g s "
            "unless it renews its lease", holder.run, holder.host, holder.pid, holder.folder, holder.ttl_s,
        )  # fmt: skip
        if await self._is_renewed(entry, holder.ttl_s):
            return False
        log.warning("that supervisor did not renew its lease for %g s: taking over", holder.ttl_s)
        return True

    def _is_predecessor(self, holder: SupervisorLease) -> bool:
        """Whether the holder ran where this one runs now: it is dead, for this one has the lock of the folder."""
        mine = self._mine
        here = (mine.folder_id, mine.folder, mine.host)
        return bool(mine.folder_id) and (holder.folder_id, holder.folder, holder.host) == here

    async def _answers(self) -> bool:
        try:
            await self._bus.request(subjects.health(self._mine.run, "supervisor"), b"", timeout_s=_ASK_S)
        except InfrastructureError:
            return False
        return True

    async def _is_renewed(self, entry: Entry, within_s: float) -> bool:
        """Return whether the lease changes within as many seconds in which the server answers without a break."""
        until_s = anyio.current_time() + within_s
        while anyio.current_time() < until_s:
            await anyio.sleep(min(_LOOK_S, within_s / _RENEWALS))
            asked_s = anyio.current_time()
            with suppress(InfrastructureError):
                now = await self._bus.value(keys.SUPERVISOR)
                if now is None or now.revision != entry.revision:
                    return True
                if anyio.current_time() - asked_s < within_s / _RENEWALS:
                    continue
            until_s = anyio.current_time() + within_s  # the server was unavailable, and no holder could renew anything
        return False

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keep the lease, and answer the caller who has it, while the context is open; then release it.

        Raises StartupError at the end if another supervisor took over meanwhile.
        """
        try:
            async with (
                self._bus.serve(subjects.health(self._mine.run, "supervisor"), self._answer),
                background() as tasks,
            ):
                tasks.start_soon(self._renew)
                yield
        finally:
            with anyio.move_on_after(_RELEASE_S, shield=True), suppress(LachesisError):  # it ends anyway
                if self.is_held:
                    await self._store(self._mine.replace(released=True))
        if self._taken_by is not None:
            raise StartupError(self._loss(self._taken_by))

    async def begin_deletion(self) -> None:
        """Let the lease say, also once it is no longer held, that what is left of the run must not be run."""
        self._mine = self._mine.replace(deleting=True)
        await self._store(self._mine)

    async def _answer(self, _: bytes) -> bytes:
        return encode(self._mine)

    async def _renew(self) -> None:
        while self.is_held:
            await anyio.sleep(self._mine.ttl_s / _RENEWALS)
            # the server is unavailable, so no other can take it either; or another wrote just now: its name is seen
            # next time
            with suppress(InfrastructureError, FencedError):
                await self._store(self._mine)
        if self._taken_by is not None:
            log.error("%s; stopping its services here", self._loss(self._taken_by))
            self._lost()

    async def _store(self, lease: SupervisorLease) -> None:
        """Write `lease` over the one that is held; where another supervisor's is there, note that."""
        try:
            self._revision = await self._write(lease, self._revision or 0)
        except FencedError:
            entry = await self._bus.value(keys.SUPERVISOR)
            holder = self._read(entry)
            if holder is not None and not holder.released and not self._is_mine(holder):
                self._taken_by = holder
            else:  # an earlier attempt of ours was stored after all, or the taker of the lease gave it back
                self._revision = await self._write(lease, entry.revision if entry else 0)

    async def _write(self, lease: SupervisorLease, revision: int) -> int:
        return await self._bus.put(keys.SUPERVISOR, encode(lease), revision=revision)

    def _is_mine(self, other: SupervisorLease) -> bool:
        mine = self._mine
        return (other.machine, other.pid, other.started, other.folder_id) == (
            mine.machine, mine.pid, mine.started, mine.folder_id,
        )  # fmt: skip

    def _read(self, entry: Entry | None) -> SupervisorLease | None:
        try:
            return None if entry is None else decode(SupervisorLease, entry.value)
        except SchemaError as error:
            raise StartupError(
                f"the lease of run {self._mine.run} cannot be read ({error}): if no machine runs it, delete the key "
                f"{keys.SUPERVISOR} of the bucket {subjects.bucket_name(self._mine.run)}"
            ) from error

    def _loss(self, holder: SupervisorLease) -> str:
        return (
            f"run {holder.run} was taken over by a supervisor on {holder.host} (pid {holder.pid}, folder "
            f"{holder.folder}), after this one could not renew its lease for {self._mine.ttl_s:g} s"
        )


@contextmanager
def lock_folder(folder: Path, run: str, *, deletes: bool = False) -> Iterator[None]:
    """Hold the folder of `run`.

    Raises `StartupError` when another supervisor does, or where the run's deletion was begun and this is not to finish
    it (`deletes`).
    """
    with (folder / LOCK_FILE).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            mend = "stop it first" if deletes else "stop it, or choose another --set folder="
            raise StartupError(f"another supervisor runs in {folder}; {mend}") from error
        if not deletes:
            refuse_half_deleted(folder, run)
        yield


async def refuse_deleting(bus: Bus, run: str) -> None:
    """Raise `StartupError` if the lease says that the deletion of the run was begun and not finished."""
    with suppress(NotFoundError, SchemaError):  # no bucket; what is no lease is said where it is taken
        entry = await bus.value(keys.SUPERVISOR)
        if entry is not None and decode(SupervisorLease, entry.value).deleting:
            raise StartupError(_half_deleted(run))


def refuse_half_deleted(folder: Path, run: str) -> None:
    """Raise `StartupError` if the deletion of `run` in its `folder` was begun and not finished."""
    if (folder / DELETION_MARK).exists():
        raise StartupError(_half_deleted(run))


def _half_deleted(run: str) -> str:
    return f"run {run} is half deleted: finish that with `lachesis runs delete {run}`, then it can start again"


def _refusal(holder: SupervisorLease) -> str:
    return (
        f"run {holder.run} is run already, by a supervisor on {holder.host} (pid {holder.pid}, folder "
        f"{holder.folder}): stop that one first. If it dies without a word, its lease is free {holder.ttl_s:g} s "
        "later. Another run on the same server needs another name (--run)"
    )


def _folder_id(folder: Path) -> str:
    """Return the name that the lock file gives the folder, written if it has none; empty if it cannot be."""
    with suppress(OSError), (folder / LOCK_FILE).open("a+") as file:  # no space, say: then only pids count
        file.seek(0)
        name = file.read().strip()
        if not name:
            name = secrets.token_hex(16)
            file.write(name)
        return name
    return ""
