"""Deletes a run: what its server has stored of it, its folder, and the record of where it was.

Guarantees: nothing goes while a supervisor, a service or a reader of the run is there; killed anywhere, the same call
finishes, and meanwhile `lachesis up` refuses what is left; of the folder only what a run makes goes, other files stay.
"""

import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from stat import S_ISDIR

import anyio
import anyio.to_thread
import msgspec

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.acknowledged import ACKNOWLEDGED
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer, StoreInUseError
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.fsync import fsync
from lachesis.pipeline.config.run import NATS_FOLDER, RunConfig
from lachesis.pipeline.errors import NotFoundError, StartupError
from lachesis.pipeline.extension import extensions
from lachesis.pipeline.inference.engine_table import engines
from lachesis.pipeline.ledger.rollbacks import RECOVERY_FILE
from lachesis.pipeline.retention.collector import GarbageCollector
from lachesis.pipeline.retention.recovery_record import RECOVERIES
from lachesis.pipeline.runtime.retention_record import RETENTION_FILE
from lachesis.pipeline.runtime.store_marks import MARKS_FILE
from lachesis.pipeline.trainer.tracked_alerts import TRACKED_ALERTS_FILE
from lachesis.pipeline.trainer.tracking import METRICS_FILE
from lachesis.schemas import keys, subjects
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import BUCKET, STREAMS
from lachesis.services.run.connect import SILENCE_S, connect_run, has_history, server_config_for_history
from lachesis.services.run.known_runs import forget_run, has_stored
from lachesis.services.run.notices_file import NOTICES_FILE
from lachesis.services.run.run_file import EFFECTIVE_FILE, MODEL_FILE, RUN_FILE, is_written_here
from lachesis.services.run.store import STORE_FILE, refuse_foreign_folder
from lachesis.services.run.supervisor_lease import DELETION_MARK, LOCK_FILE, RunLease, lock_folder
from lachesis.services.run.supervisor_state import KEEPER_FILE, STATE_FILE, SUPERVISOR_LOG
from lachesis.services.stage_settings import history_settings

__all__ = ["MODEL_MARK", "FolderContents", "RunContents", "delete_folder", "delete_run", "measure_folder"]

MODEL_MARK = ".lachesis-copy"
"""In a folder of `_MODELS` that the demo made, and that goes with its run; any other is somebody's."""
_MODELS = ("model", "teacher")
_ENTRIES = frozenset({
    ACKNOWLEDGED, "checkpoints", "environments", "inference", "logs", NATS_FOLDER, "plots",
    "trainers", "web.token", "weights", METRICS_FILE, f".{METRICS_FILE}.partial",
    TRACKED_ALERTS_FILE, f".{TRACKED_ALERTS_FILE}.partial", "pids.json", ".pids.json.partial", "summary.json",
    NOTICES_FILE, f".{NOTICES_FILE}.partial",
    ".summary.json.partial", MODEL_FILE, f".{MODEL_FILE}.partial",
    SUPERVISOR_LOG, f"{SUPERVISOR_LOG}.old", f"{SUPERVISOR_LOG}.old.partial",
    STATE_FILE, f".{STATE_FILE}.partial", KEEPER_FILE, f".{KEEPER_FILE}.partial",
    MARKS_FILE, f".{MARKS_FILE}.partial", RECOVERY_FILE, f".{RECOVERY_FILE}.partial", RECOVERIES,
    RETENTION_FILE, f".{RETENTION_FILE}.partial",
    "forkserver-plain.sock", "forkserver-torch.sock", STORE_FILE, f".{STORE_FILE}.partial",
    f".{RUN_FILE}.partial", f".{EFFECTIVE_FILE}.partial",
})  # fmt: skip
"""What a run makes in its folder, but for what says that it is one, which goes last."""
_HELD_OUT = re.compile(rf"\.?{re.escape(keys.held_out(''))}[^/]+\.msgpack(?:\.partial)?")
_LAST = (EFFECTIVE_FILE, RUN_FILE, LOCK_FILE, DELETION_MARK)
_RECONNECT_S = 2.0
"""Seconds in which services that outlived their supervisor connect to a server that is started in its place."""


class FolderContents(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a run's folder: files and bytes of the run; `kept`: the names of what is not the run's, and stays."""

    path: str
    files: int
    bytes: int
    kept: list[str]


class StoredAmount(msgspec.Struct, frozen=True):
    """What one of the run's streams holds."""

    messages: int
    bytes: int


class RunContents(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run: by stream what it holds, unless `problem` says why that is not known; its folder."""

    run: str
    streams: dict[str, StoredAmount]
    folder: FolderContents | None
    problem: str | None = None


async def delete_run(config: RunConfig, confirm: Callable[[RunContents], bool]) -> tuple[RunContents, bool]:
    """Delete a run if `confirm`, which is called once the run is known to be over, says so.

    Return what there was of it, and whether it was deleted.

    Raises `NotFoundError` where there is nothing of the run; `ConfigError` and `StartupError` where it is not over, is
    read, or its server cannot be reached.
    """
    folder = config.path
    refuse_foreign_folder(config)
    with lock_folder(folder, config.run, deletes=True) if folder.is_dir() else nullcontext():
        async with _server(config) as (bus, problem):
            if bus is not None:
                await _check_over(bus, config)
            contents = await _contents(bus, config, problem)
            stored = [] if bus is None else [one.name for one in await bus.describe_streams()]
            has_bucket = subjects.stream_name(config.run, BUCKET) in stored
            if contents.folder is None and not stored and not has_stored(folder):
                raise NotFoundError(f"there is nothing of a run {config.run}: no folder {folder}, no history")
            if not confirm(contents):
                return contents, False
            if bus is not None and has_bucket:
                await GarbageCollector(bus, history_settings(config)).check_unread()
            if folder.is_dir():
                (folder / DELETION_MARK).touch()
                fsync(folder)
            if bus is not None and config.nats is not None:  # all that its own server has is in the folder
                await _delete_stored(bus, config, has_bucket=has_bucket)
        if folder.is_dir():
            await anyio.to_thread.run_sync(delete_folder, folder)
    forget_run(folder)
    return contents, True


@asynccontextmanager
async def _server(config: RunConfig) -> AsyncIterator[tuple[NatsBus | None, str | None]]:
    """Yield the bus of the run's server, if there is one to query, or why it cannot be queried."""
    async with AsyncExitStack() as stack:
        bus, problem = None, None
        if config.nats is not None:
            bus = await stack.enter_async_context(await connect_run(config, f"{config.run}.delete", OPERATOR))
        elif has_history(config) and not (config.path / DELETION_MARK).exists():
            try:
                server = await stack.enter_async_context(
                    EmbeddedServer(config.path / NATS_FOLDER, server_config_for_history(config))
                )
                bus = await connect(server.url, run=config.run, name=f"{config.run}.delete", token=server.token)
                await stack.enter_async_context(bus)
            except StoreInUseError:
                raise
            except StartupError as error:
                problem = f"its history cannot be read: {error}"
        yield bus, problem


async def _check_over(bus: NatsBus, config: RunConfig) -> None:
    """Raise `ConfigError` where a service of the run is there, or its own server has other runs, which would go too.

    Services that a killed supervisor left connect to whatever server is started on the run's folder.
    """
    others = sorted(set(await bus.runs()) - {config.run}) if config.nats is None else []
    if others:
        raise ConfigError(
            f"the server in {config.path} has other runs as well, which would go with the folder: {', '.join(others)}; "
            "export what is to be kept of them (`lachesis export`), then delete the folder by hand"
        )
    with anyio.move_on_after(SILENCE_S + (_RECONNECT_S if config.nats is None else 0.0)):
        async with bus.listen(subjects.heartbeat(config.run)) as beats:
            beat = await anext(aiter(beats))
            raise ConfigError(f"run {config.run} goes on: its {beat.subject.split('.')[3]} is there. Stop it first")


async def _contents(bus: NatsBus | None, config: RunConfig, problem: str | None) -> RunContents:
    streams: dict[str, StoredAmount] = {}
    if bus is not None:
        for kind in STREAMS:
            with suppress(NotFoundError):
                usage = await bus.usage(kind)
                if usage.messages:
                    streams[kind] = StoredAmount(usage.messages, usage.bytes)
    folder = await anyio.to_thread.run_sync(measure_folder, config.path) if config.path.is_dir() else None
    return RunContents(run=config.run, streams=streams, folder=folder, problem=problem)


async def _delete_stored(bus: NatsBus, config: RunConfig, *, has_bucket: bool) -> None:
    """Delete the run's streams, and last its bucket: until then the lease there says that the run is being deleted."""
    async with AsyncExitStack() as held:
        if has_bucket:  # without it no supervisor can run the run
            tasks = await held.enter_async_context(background())
            lease = RunLease(bus, config.run, config.path, tasks.cancel_scope.cancel, deletes=True)
            await lease.acquire()
            await held.enter_async_context(lease.held())
            await lease.begin_deletion()
            await GarbageCollector(bus, history_settings(config)).check_unread()
        for kind in STREAMS:
            await bus.delete_stream(kind)
    await bus.delete_stream(BUCKET)


def measure_folder(folder: Path) -> FolderContents:
    """Return what is in a run's folder."""
    files = size = 0
    for entry in _own_entries(folder):
        for path in [entry, *entry.rglob("*")] if entry.is_dir() and not entry.is_symlink() else [entry]:
            with suppress(FileNotFoundError):
                stat = path.lstat()
                files, size = files + (not S_ISDIR(stat.st_mode)), size + stat.st_size
    return FolderContents(path=str(folder), files=files, bytes=size, kept=_foreign_entries(folder))


def delete_folder(folder: Path) -> None:
    """Delete what a run made in its folder, and the folder itself if nothing else is in it.

    What says that it is a run, and half deleted, goes last.
    """
    for entry in _own_entries(folder):
        if entry.name not in _LAST:
            _delete(entry)
    for name in _LAST:
        fsync(folder)  # what goes last is not to outlive a power loss alone
        if _is_own(folder / name):
            _delete(folder / name)
    if not any(folder.iterdir()):
        folder.unlink() if folder.is_symlink() else folder.rmdir()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _own_entries(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if _is_own(entry)]


def _foreign_entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not _is_own(entry))


def _is_own(entry: Path) -> bool:
    if entry.name in _MODELS:
        return (entry / MODEL_MARK).exists()
    if entry.name == RUN_FILE:
        return is_written_here(entry)
    further = {name for one in extensions().values() for name in one.folder_entries}
    further |= {name for one in engines().values() for name in one.folder_entries}
    return entry.name in _ENTRIES | further or entry.name in _LAST or _HELD_OUT.fullmatch(entry.name) is not None
