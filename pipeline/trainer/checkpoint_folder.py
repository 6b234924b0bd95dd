"""The folder of checkpoints: written elsewhere, synced, renamed, then named by `latest`. No torch.

Guarantees that `latest` only ever names a complete, synced checkpoint, and that a failed save leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from lachesis.pipeline.common.disk import is_disk_full
from lachesis.pipeline.common.fsync import fsync, make_folder, sync_tree
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.errors import CheckpointError, FencedError
from lachesis.pipeline.ledger.checkpoint_state import (
    BEST,
    PARTIAL,
    POINTER,
    STATE,
    TrainerState,
    best_checkpoint,
    known_checkpoints,
    write_pointer,
)
from lachesis.pipeline.ledger.checkpoint_sums import verify_sums, write_sums
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.values import from_json

__all__ = ["only_writer", "point_to_best", "read_checkpoint", "write_checkpoint"]


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold `folder` until the context ends, or the process does, however that happens.

    Raises `FencedError` when another process holds it, a stopped one included.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise FencedError(
                f"another trainer (pid {lock.read().decode() or 'unknown'}) writes {folder}; stop it first, or leave "
                "it to it"
            ) from error
        lock.truncate(0)
        try:
            lock.write(str(os.getpid()).encode())
        except OSError as error:  # the pid is for people: what counts is the lock, which takes no room
            if not is_disk_full(error):
                raise
        yield


def write_checkpoint(
    folder: Path, state: TrainerState, write: Callable[[Path], None], *, keep: int, every: int = 1
) -> Path:
    """Make a checkpoint of `state` and what `write` puts into the folder it gets; return its path.

    The newest `keep` checkpoints at multiples of `every` steps stay, others where there are fewer of these, and in any
    case the newest and the best one. The rest and leftovers of crashed writers are removed.
    """
    if keep < 1:
        raise ConfigError(f"keep is {keep}; at least the newest checkpoint must stay.")
    make_folder(folder)
    name = _free_name(folder, state.step)
    partial = folder / f"{PARTIAL}{name}"
    _remove(folder.glob(f"{PARTIAL}*"))
    try:
        partial.mkdir()
        write(partial)
        (partial / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        write_sums(partial)
        sync_tree(partial)
        partial.rename(folder / name)
        fsync(folder)
        write_pointer(folder, POINTER, name)
    except BaseException:
        _discard(folder, name)
        raise
    _prune(folder, keep, name, every)
    return folder / name


def read_checkpoint(path: Path) -> TrainerState:
    """Return the state of a checkpoint that is, byte for byte, what was written. Raises `CheckpointError`."""
    verify_sums(path)
    try:
        return from_json(STATE, TrainerState, read_small_file(path / STATE))
    except (OSError, SchemaError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {error}") from error


def point_to_best(folder: Path, best: PolicyVersion) -> Path | None:
    """Point `best` to the checkpoint of the policy with the best held-out rate, and return it.

    If this policy has no checkpoint, `best` points to the checkpoint with the nearest step, the older of two. If the
    best policy is the one that training began with, there is no pointer, and None is returned.
    """
    known = known_checkpoints(folder)
    if best.step == 0 or not known:
        (folder / BEST).unlink(missing_ok=True)
        return None

    def distance(checkpoint: tuple[Path, TrainerState]) -> tuple[int, bool, int]:
        state = checkpoint[1]
        return abs(state.step - best.step), not state.policy_version.endswith(best.digest), state.step

    path, _ = min(known, key=distance)
    if best_checkpoint(folder) != path:
        write_pointer(folder, BEST, path.name)
    return path


def _discard(folder: Path, name: str) -> None:
    """Remove the files of a failed save, unless `latest` names it already."""
    with suppress(OSError):  # the error that made it fail counts
        pointer = folder / POINTER
        named = pointer.read_text().strip() if pointer.exists() else None
        if (folder / name).exists() and named != name:
            (folder / name).rename(folder / f"{PARTIAL}{name}")
        _remove(folder.glob(f"{PARTIAL}*"))


def _free_name(folder: Path, step: int) -> str:
    """Return an unused folder name: a step saved again after a crash never touches what `latest` names."""
    base = f"step-{step:08d}"
    names = [base, *(f"{base}-{number}" for number in range(1, len(list(folder.iterdir())) + 1))]
    return next(name for name in names if not (folder / name).exists())


def _prune(folder: Path, keep: int, newest: str, every: int) -> None:
    _remove(folder.glob(f"{PARTIAL}*"))
    complete = sorted((path for path in folder.glob("step-*") if path.is_dir()), key=lambda p: p.stat().st_mtime_ns)
    ranked = sorted(complete, key=lambda path: _step_of(path) % every == 0)  # stable: the newest of each kind last
    kept = {newest, *(path.name for path in ranked[-keep:])}
    best = best_checkpoint(folder)
    for path in [path for path in complete if path.name not in kept and path != best]:
        path.rename(folder / f"{PARTIAL}{path.name}")  # what is half deleted must not pass for a checkpoint
    _remove(folder.glob(f"{PARTIAL}*"))


def _step_of(path: Path) -> int:
    """Return the step of a checkpoint's folder, 0 if its name is another one's."""
    step = path.name.split("-")[1]
    return int(step) if step.isdecimal() else 0


def _remove(leftovers: Iterable[Path]) -> None:
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
