"""Describes recoveries, and makes a retention record that was lost again from what earlier ones noted.

Each completed recovery leaves its plan in a file of the run's folder, and `lachesis up` keeps a copy of the record
there. So the lists of what is lost or left out outlive the key of the bucket that holds them. Otherwise a later
recovery would take the same losses for new ones.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.runtime.retention_record import read_copy
from lachesis.schemas import keys
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import TrainReport
from lachesis.schemas.retention import LostRange, Retention
from lachesis.schemas.subjects import LEDGER
from lachesis.schemas.values import from_json

__all__ = [
    "RECOVERIES",
    "CheckpointChange",
    "RecoveryPlan",
    "SavedCopy",
    "StreamLoss",
    "add_to_record",
    "complete_record",
    "describe_unnoted",
]

log = logging.getLogger("lachesis")

RECOVERIES: Final = "recoveries"
"""Folder, inside a run's, of completed recoveries: what each did, and what it replaced."""


_MAX_NAMED: Final = 4


class StreamLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences `first` to `last` of a stream are lost. The stream ends at `end`."""

    stream: str
    first: int
    last: int
    end: int


class SavedCopy(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of a stream that only the copy of `server` had, in a file beside the record of the recovery."""

    stream: str
    server: str
    file: str
    messages: int


class CheckpointChange(msgspec.Struct, frozen=True, kw_only=True):
    """Training goes back from step `from_step` to `step`, to checkpoint `name`; None: to the starting model."""

    from_step: int
    step: int
    name: str | None
    previous: str | None
    """The checkpoint that the pointer to the newest one named."""


class RecoveryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The changes that a recovery makes, and the values that it replaces.

    `problems`: why it is needed. `groups`: the lost rollouts with known names, by sequence. `settled`: the number of
    lost rollouts that had their outcome in the ledger. `copies`: sequences of
    ROLLOUTS that are stored again. `rescore_from`: the first rollout that is scored again. `report`: the trainer's
    last report, which is deleted with all before it. `reports`: the sequences of the reports that stages read last.
    `policy`: the record of the newest weights, which is deleted. `ends`: the ends of streams that have several
    copies in a cluster, and `ended_ns` the times of the messages there; what only other copies have is `saved` (None
    until it is), then the copies are made again from the leaders', and `has_new_copies` is set. `left_out`: messages
    that their services cannot use, by stream.
    `keys`: keys of the bucket with values that are put aside, and those values. `elsewhere`: the checkpoint, not in
    this folder, that the trainer reported last. `earlier`: what the retention record should list and does not.
    `makes`: streams in place of which empty ones are made, before it can be seen what else is wrong; such a plan holds
    nothing else.
    """

    run: str
    id: str
    problems: list[str]
    losses: list[StreamLoss] = []
    bucket_went_back: bool = False
    groups: dict[int, str] = {}
    settled: int = 0
    copies: list[int] = []
    rescore_from: int | None = None
    checkpoint: CheckpointChange | None = None
    report: TrainReport | None = None
    policy: PolicyRecord | None = None
    trimmed: dict[str, int] = {}
    reports: list[int] = []
    ends: dict[str, int] = {}
    ended_ns: dict[str, int] = {}
    has_new_copies: bool = False
    saved: list[SavedCopy] | None = None
    left_out: dict[str, list[int]] = {}
    keys: dict[str, bytes] = {}
    elsewhere: str | None = None
    earlier: Retention | None = None
    makes: list[str] = []


def add_to_record(record: Retention, plan: RecoveryPlan) -> Retention:
    """Return the record with what a recovery notes in it."""
    lost: dict[str, list[LostRange]] = {}
    for loss in plan.losses:
        lost.setdefault(loss.stream, []).append(LostRange(loss.first, loss.last))
    if plan.reports:
        lost.setdefault(LEDGER, []).extend(LostRange(seq, seq) for seq in plan.reports)
    record = record.with_lists_of(Retention(run=record.run, trimmed=plan.trimmed, lost=lost, left_out=plan.left_out))
    return record if plan.earlier is None else record.with_lists_of(plan.earlier)


def complete_record(stored: Retention | None, run: str, folder: Path) -> Retention:
    """Return the record with what the folder's copy lists, and with what earlier recoveries noted.

    `stored`: None if it cannot be read or is not there. Its holds are gone then, and holders learn it when they renew.
    """
    record = (stored or Retention(run=run)).with_lists_of(read_copy(folder, run))
    for plan in _earlier_recoveries(folder, run):
        record = add_to_record(record, plan)
    return record


def describe_unnoted(record: Retention, folder: Path) -> str | None:
    """Return what a record lists as lost or left out and no recovery in the folder noted.

    None: all was noted. Only a recovery writes these lists. One that somebody else wrote hides losses, or what a
    service wrote.
    """
    noted = Retention(run=record.run)
    for plan in _earlier_recoveries(folder, record.run):
        noted = add_to_record(noted, plan)
    noted = noted.replace(trimmed={}, orphans={})
    ranges = [
        (first, last, stream, "lost")
        for stream, lost in sorted(record.lost.items())
        for one in lost
        for first, last in noted.unexplained(stream, one.first, one.last)
    ] + [
        (seq, seq, stream, "passed over")
        for stream, seqs in sorted(record.left_out.items())
        for seq in sorted({*seqs} - {*noted.left_out.get(stream, ())})
    ]
    if not ranges:
        return None
    named = [f"{first} to {last} of {stream} ({what})" for first, last, stream, what in ranges[:_MAX_NAMED]]
    more = f" and {len(ranges) - _MAX_NAMED} more" if len(ranges) > _MAX_NAMED else ""
    return (
        f"the key {keys.RETENTION!r} lists what no recovery in {folder / RECOVERIES} noted: sequences "
        f"{', '.join(named)}{more}. It hides what else would be missed there"
    )


def _earlier_recoveries(folder: Path, run: str) -> Iterator[RecoveryPlan]:
    for file in sorted((folder / RECOVERIES).glob("*.json")):
        try:
            plan = from_json(file.name, RecoveryPlan, read_small_file(file))
        except (OSError, SchemaError) as error:
            log.warning("%s, which says what a recovery noted, cannot be read: %s", file, error)
            continue
        if plan.run == run:
            yield plan
