"""Exports selected rollouts of a run, each with the annotations derived from it, into one file.

Turns rollouts, the annotations of one revision and the ledger into rows (`logic.row`), in the order of ROLLOUTS.
Guarantees that memory does not grow with history: what one pass over the streams leaves for the next is kept in an
index on disk. What is read is not trimmed meanwhile, and the file is there whole or not at all (`files`).
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import anyio.to_thread
import msgspec

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.last_event import decode_owned
from lachesis.pipeline.bus.skipped_messages import read_skipped
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.offline.archive.files import Format, whole_file
from lachesis.pipeline.offline.archive.index import Index
from lachesis.pipeline.offline.archive.jsonl import JsonLinesWriter
from lachesis.pipeline.offline.archive.logic.row import DerivedColumns, RolloutRow, rows_of
from lachesis.pipeline.offline.archive.parquet import ParquetWriter, load_pyarrow
from lachesis.pipeline.offline.replay.revisions import definition, read_derived
from lachesis.pipeline.offline.replay.selected import SelectedRollout, feed, selected
from lachesis.pipeline.retention.holds import OpenHold, holding, read_record
from lachesis.pipeline.runtime.rollouts import read_rollout
from lachesis.schemas import subjects
from lachesis.schemas.annotations import GroupReward, GroupScore
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import is_group_id
from lachesis.schemas.ledger import LedgerEntry, OutcomeKind
from lachesis.schemas.replay import RevisionRecord, Selection
from lachesis.schemas.subjects import EVENTS, LEDGER, ROLLOUTS

__all__ = ["ExportRequest", "ExportSummary", "Exporter"]

_BURST_GROUPS = 1024
"""Headers or annotations written into the index at once."""
_BURST_TOKENS = 1 << 18
"""Tokens of rows that are handed to the writer at once."""
_MAX_REASONS = 20

Progress = Callable[[int, int], None]
"""Called with how many groups are written, of how many."""


class ExportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to export; `groups` is the list that `selection.groups` is the digest of."""

    path: Path
    format: Format
    revision: str
    selection: Selection
    groups: Collection[str] | None = None
    overwrite: bool = False


class ExportSummary(msgspec.Struct, kw_only=True):
    """What was written. `unscored` groups have no score there, `left_out` could not be written at all, with the first
    `reasons`. `kept_from` is by stream the sequence below which history may have been trimmed before."""

    file: str
    revision: str
    groups: int = 0
    rows: int = 0
    bytes: int = 0
    unscored: int = 0
    left_out: int = 0
    reasons: list[str] = []
    kept_from: dict[str, int] = {}
    seconds: float = 0.0


class _Writer(Protocol):
    def write(self, rows: Sequence[RolloutRow]) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


class _Score(msgspec.Struct, array_like=True):
    ensemble: str | None
    raters: dict[str, str] | None
    score: GroupScore


class _RewardPart(msgspec.Struct, array_like=True):
    estimator: str | None
    reward: GroupReward


class _End(msgspec.Struct, array_like=True):
    outcome: OutcomeKind
    reason: str | None = None
    batch: int | None = None
    advantages: list[float | None] | None = None


class Exporter:
    """Use `run` once."""

    def __init__(self, bus: Bus, config: RunConfig, request: ExportRequest, progress: Progress) -> None:
        self._bus = bus
        self._config = config
        self._request = request
        self._progress = progress
        self._done = ExportSummary(file=str(request.path), revision=request.revision)
        self._rows: list[RolloutRow] = []
        self._tokens = 0

    async def run(self) -> ExportSummary:
        """Write the file.

        Raises `NotFoundError` where the revision is unknown, nothing is selected or some of it may be trimmed,
        `ConfigError` where the file cannot be written, `StartupError` where Parquet is wanted and pyarrow missing,
        `InfrastructureError` where a disk is full.
        """
        started, config, request = time.monotonic(), self._config, self._request
        if request.format == "parquet":
            load_pyarrow()  # or it is missed only once all history was read
        run, folder = config.run, request.path.absolute().parent
        defined = await definition(self._bus, config, request.revision)
        with whole_file(request.path, overwrite=request.overwrite) as file, Index.open(folder) as index:
            trimmed = (await read_record(self._bus, run)).trimmed
            self._done.kept_from = {stream: seq for stream, seq in trimmed.items() if seq > 1}
            first = request.selection.first_seq or max(1, trimmed.get(ROLLOUTS, 1))
            needs = {ROLLOUTS: first, EVENTS: max(1, trimmed.get(EVENTS, 1))}
            about = f"export of {request.revision} to {request.path.name}"
            async with holding(self._bus, run, "export", needs, about=about) as held:
                total = await self._select(index, first)
                await self._gather(index, defined)
                held.needs = {ROLLOUTS: first}
                writer = self._writer(file, total)
                try:
                    await self._write(index, total, writer, held)
                except BaseException:
                    writer.abandon()
                    raise
            await anyio.to_thread.run_sync(file.flush)
            self._done.bytes = file.tell()
        self._done.seconds = time.monotonic() - started
        return self._done

    def _writer(self, file: BinaryIO, total: int) -> _Writer:
        if self._request.format == "jsonl":
            return JsonLinesWriter(file)
        selection = msgspec.to_builtins(self._request.selection)
        about: dict[str, Any] = {"run": self._config.run, "revision": self._request.revision, "groups": total}
        return ParquetWriter(file, {**about, "selection": selection, "written_ns": time.time_ns()})

    # -- what there is

    async def _select(self, index: Index, first: int) -> int:
        """Put into the index what is selected, and return how many groups it is."""
        run, request = self._config.run, self._request
        last = min(request.selection.last_seq or (1 << 62), (await self._bus.usage(ROLLOUTS)).last)
        total, burst = 0, list[SelectedRollout]()
        chosen = selected(
            self._bus, run, request.selection, request.groups, envs=request.selection.envs, first=first, last=last
        )
        async with aclosing(chosen):
            async for found in chosen:
                burst.append(found)
                total += 1
                if len(burst) == _BURST_GROUPS:
                    index.select(burst)
                    burst.clear()
                    self._progress(0, total)
        index.select(burst)
        where = f"run {run}, {', '.join(request.selection.envs)}, sequences {first} to {last} of {ROLLOUTS}"
        missing = sorted(group for group in request.groups or () if not index.has(group))
        if missing:
            raise NotFoundError(
                f"{len(missing)} of the {len(request.groups or ())} groups listed are not selected in {where}: "
                f"{missing[0]}{' and others' if len(missing) > 1 else ''}; take them off the list or select more"
            )
        if not total:
            raise NotFoundError(
                f"nothing is selected in {where}; `lachesis tail rollout --since-start` shows what is there"
            )
        return total

    async def _gather(self, index: Index, defined: RevisionRecord | None) -> None:
        """Put into the index what was derived of what is selected, and what became of it."""
        pack = msgspec.msgpack.encode
        async with aclosing(read_derived(self._bus, self._config, defined)) as events:
            async for event in events:
                index.remember_derived(
                    "score", ((one.group, pack(_Score(event.ensemble, event.raters, one))) for one in event.scores)
                )
                index.remember_derived(
                    "reward", ((one.group, pack(_RewardPart(event.estimator, one))) for one in event.rewards)
                )
                index.remember_derived(
                    "unscored",
                    ((group, why.encode()) for _, group, why in event.unscored if group and is_group_id(group)),
                )
        run, trainer, follows = self._config.run, self._config.training.name, 0

        def is_next(entry: LedgerEntry) -> bool:
            return (entry.run, entry.trainer) == (run, trainer) and entry.index >= follows

        left_out = await read_skipped(self._bus)
        async with self._bus.read(LEDGER, [subjects.ledger(run, trainer)], follow=False) as entries:
            async for message in entries:  # its beginning may have been deleted, so no chain is followed
                entry = await decode_owned(self._bus, LedgerEntry, message, is_next, left_out=left_out)
                if entry is not None:
                    follows = entry.index + 1
                    index.end(_ends(entry))

    # -- what is written of it

    async def _write(self, index: Index, total: int, writer: _Writer, held: OpenHold) -> None:
        async def take(found: SelectedRollout, message: StoredMessage) -> bool:
            self._export_group(index, found, message)
            if self._tokens >= _BURST_TOKENS:
                await self._flush(writer)
            return True

        for page in index.pages():
            await feed(self._bus, self._config.run, "*", page, take)
            held.needs[ROLLOUTS] = page[-1].seq + 1
            self._progress(self._done.groups + self._done.left_out, total)
        await self._flush(writer)
        await anyio.to_thread.run_sync(writer.close)

    def _export_group(self, index: Index, found: SelectedRollout, message: StoredMessage) -> None:
        done, derived = self._done, self._derived_columns(index, found)
        try:
            rollout = read_rollout(message)
            rows = rows_of(rollout.group, rollout.seq, rollout.stored_ns, derived)
        except DataError as error:
            done.left_out += 1
            if len(done.reasons) < _MAX_REASONS:
                done.reasons.append(f"group {found.group} at sequence {found.seq}: {error}")
            return
        done.groups, done.rows = done.groups + 1, done.rows + len(rows)
        done.unscored += derived.score is None
        self._rows += rows
        self._tokens += sum(len(row.tokens) + 64 for row in rows)

    async def _flush(self, writer: _Writer) -> None:
        await anyio.to_thread.run_sync(writer.write, self._rows)
        self._rows, self._tokens = [], 0

    def _derived_columns(self, index: Index, found: SelectedRollout) -> DerivedColumns:
        derived = DerivedColumns(revision=self._request.revision)
        if (data := index.derived("score", found.group)) is not None:
            stored = msgspec.msgpack.decode(data, type=_Score)
            derived.score, derived.ensemble, derived.raters = stored.score, stored.ensemble, stored.raters
        elif (reason := index.derived("unscored", found.group)) is not None:
            derived.unscored = reason.decode()
        if (data := index.derived("reward", found.group)) is not None:
            given = msgspec.msgpack.decode(data, type=_RewardPart)
            derived.reward, derived.estimator = given.reward, given.estimator
        if (data := index.ended(found.seq)) is not None:
            end = msgspec.msgpack.decode(data, type=_End)
            derived.outcome, derived.outcome_reason = end.outcome, end.reason
            derived.batch, derived.batch_advantages = end.batch, end.advantages
        return derived


def _ends(entry: LedgerEntry) -> list[tuple[int, bytes]]:
    """Return what became of the rollouts that an entry names, by sequence."""
    pack, found = msgspec.msgpack.encode, []
    if entry.batch is not None:
        number = entry.batch.number
        found += [(ref.seq, pack(_End("batched", None, number, ref.advantages))) for ref in entry.batch.groups]
    return found + [(one.seq, pack(_End(one.kind, one.reason))) for one in entry.outcomes]
