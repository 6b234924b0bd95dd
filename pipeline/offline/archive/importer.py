"""Imports rollouts from files into a run's stream, where every stage treats them as any other.

Guarantees that

* a group is stored once, however often and by however many processes its file is imported: its id shows whether it is
  stored already, and the broker's window of duplicates catches what another import stores meanwhile; the ids are read
  again well within that window;
* a live run keeps its bounds: each group waits for a lease of the governor, as a producer's does. If there can be no
  governor, because no other client is on the server or the caller says so, the byte budgets are kept here;
* what is in a file and not stored is reported, with file, line and reason.

Only rollouts are imported: scores and rewards are derived from them again.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from itertools import islice
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from lachesis.pipeline.common.trainability import TrainerLimits, why_untrainable
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environment.leases import ProducerLeases
from lachesis.pipeline.errors import InfrastructureError, NotFoundError, StreamFullError, UnservedError
from lachesis.pipeline.offline.archive.files import Format
from lachesis.pipeline.offline.archive.index import Index
from lachesis.pipeline.offline.archive.logic.foreign_lines import PRODUCER, ImportAssumptions, ReadLine
from lachesis.pipeline.offline.archive.reader import PlacedGroup, read_groups
from lachesis.pipeline.offline.replay.selected import SelectedRollout, selected
from lachesis.pipeline.retention.budget import MEASURED_STREAMS, Budget, ByteReservation
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import LeaseRequest, PolicyRecord
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.planning_header import PLAN_HEADER, TRACEPARENT_HEADER, Plan, traceparent
from lachesis.schemas.replay import Selection
from lachesis.schemas.rollout import RolloutGroup
from lachesis.schemas.subjects import ROLLOUTS

__all__ = ["ImportRequest", "ImportSummary", "Importer"]

_ALLOWANCE_BYTES = 4096
"""Bytes by which a group grows on the wire: headers, and its lease."""
_MAX_READ_GROUPS = 64
_MAX_READ_TOKENS = 1 << 19
"""Groups and tokens that are read at once."""
_USAGE_S = 1.0
_ANSWER_S = 5.0
"""What a governor may take to answer, seconds."""

Progress = Callable[[int, int], None]
"""Called with how many bytes of all files are done, of how many."""
Complain = Callable[[str, str], None]
"""Called for each group that is left out: with its place, and why."""


class ImportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to import. `foreign`: how lines of another project are read. `leased` is false where no governor runs."""

    files: list[tuple[Path, Format]]
    foreign: tuple[ReadLine, ImportAssumptions] | None = None
    skip_bad: bool = False
    leased: bool = True
    wait_s: float = 30.0


class ImportSummary(msgspec.Struct, kw_only=True):
    """What became of the groups: `stored` now, `known` from before, `bad` left out. Of those stored `untrainable` lack
    logprobs or hold what the trainer cannot use."""

    stored: int = 0
    untrainable: int = 0
    known: int = 0
    bad: int = 0
    sequences: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Importer:
    """Use `run` once."""

    def __init__(
        self, service: Service, config: RunConfig, request: ImportRequest, *, progress: Progress, complain: Complain
    ) -> None:
        self._service = service
        self._bus = service.bus
        self._config = config
        self._request = request
        self._progress = progress
        self._complain = complain
        self._done = ImportSummary()
        self._leases: dict[str, ProducerLeases] = {}
        self._limits = TrainerLimits(reads=config.trainer_reads, temperature=config.trained_temperature)
        self._budget = Budget(config.flow)
        self._measured_s = float("-inf")
        self._scanned, self._scanned_s = 0, float("-inf")

    async def run(self, folder: Path) -> ImportSummary:
        """Store what the files hold; the index of what is stored already lies in `folder`.

        Raises `DataError` on the first bad group unless they are to be skipped, `StreamFullError` where there is no
        room, `InfrastructureError` where the governor admits nothing for `wait_s`, and `ConfigError`.
        """
        started, request = time.monotonic(), self._request
        if not request.leased and await self._governed():
            raise ConfigError("a governor runs, so groups need its leases: leave --unleased out")
        total = sum(path.stat().st_size for path, _ in request.files)
        before = 0
        policy = await self._bus.value(keys.POLICY)
        if policy is not None:
            vocabulary = decode(PolicyRecord, policy.value).vocabulary
            self._limits = self._limits._replace(vocabulary=vocabulary)  # its tokenizer may be unknown in old files
        with Index.open(folder) as index:
            for path, kind in request.files:
                size = path.stat().st_size
                groups = read_groups(path, kind, run=self._config.run, foreign=request.foreign)
                while part := await anyio.to_thread.run_sync(_part, groups):
                    for placed in part:
                        await self._store_group(index, placed)
                        self._progress(before + int(placed.share * size), total)
                before += size
        self._done.seconds = time.monotonic() - started
        return self._done

    async def _governed(self) -> bool:
        """Whether a governor is there. Raises `InfrastructureError` where one is and says nothing."""
        env = next(iter(self._config.environments), None)  # any: it serves all of them, or none
        if env is None:
            return False
        request = LeaseRequest(op="release", producer=PRODUCER, env=env, lease="none")
        try:
            await self._bus.request(subjects.lease(self._config.run, env), encode(request), timeout_s=_ANSWER_S)
        except UnservedError:
            return False
        return True

    async def _store_group(self, index: Index, placed: PlacedGroup) -> None:
        """Store a group unless it is stored, or say why it cannot be."""
        group = placed.group
        refusal = placed.error if group is None else self._refusal(group)
        if group is None or refusal is not None:
            if not self._request.skip_bad:
                raise DataError(
                    f"{placed.place}: {refusal}. {self._done.stored} groups are stored; fix it and repeat the "
                    "command, which continues from there, or give --skip-bad"
                )
            self._complain(placed.place, refusal or "")
            self._done.bad += 1
            return
        await self._scan(index)
        if index.has(group.id):
            self._done.known += 1
            return
        seq = await (self._store_leased(group) if self._request.leased else self._store(group))
        index.select([SelectedRollout(group.env, seq, group.id)])

    def _refusal(self, group: RolloutGroup) -> str | None:
        settings, n = self._config.environments, group.sequences.n_samples
        if group.env not in settings:
            return f"env: the run has no environment {group.env!r}; there are {', '.join(settings) or 'none'}"
        most = self._config.batching.batch_size
        if n > most:
            return f"samples: {n}, but a batch has {most} and groups are never split; raise batching.batch_size"
        return None

    # -- what is stored already

    async def _scan(self, index: Index) -> None:
        """Read the ids of what came since the last time, well before the broker forgets what it stored since."""
        now_s = time.monotonic()
        if now_s - self._scanned_s < self._config.streams.duplicate_window_s / 4:
            return
        last = (await self._bus.usage(ROLLOUTS)).last
        anything = Selection(envs=["*"])
        found = selected(self._bus, self._config.run, anything, None, envs=["*"], first=self._scanned + 1, last=last)
        burst: list[SelectedRollout] = []
        async with aclosing(found):
            async for one in found:
                burst.append(one)
                if len(burst) == 1024:
                    index.select(burst)
                    burst.clear()
        index.select(burst)
        self._scanned, self._scanned_s = last, now_s

    # -- storing

    async def _store_leased(self, group: RolloutGroup) -> int:
        leases = self._leases.setdefault(group.env, ProducerLeases(self._service, PRODUCER, group.env))
        size, lease = len(encode(group)) + _ALLOWANCE_BYTES, None
        with anyio.move_on_after(self._request.wait_s):
            lease = await leases.acquire(group.sequences.n_samples, size)
        if lease is None:
            raise InfrastructureError(
                f"{self._done.stored} groups are stored, then none was admitted for {self._request.wait_s:g} s "
                f"({self._service.vitals.status_text or 'no answer'}); repeat the command once the run goes on: it "
                "continues there. For a run that has ended, give --unleased"
            )
        try:
            return await self._publish(group.replace(lease=lease))
        finally:
            leases.settled(lease)

    async def _store(self, group: RolloutGroup) -> int:
        """Store a group within the byte budgets: room is kept for what its stages will store of it."""
        size = len(encode(group)) + _ALLOWANCE_BYTES
        await self._measure()
        room = ByteReservation.of(self._config.flow, sequences=group.sequences.n_samples, bytes_=size)
        full = self._budget.reason_never_possible(room) or self._budget.refusal_reason(room)
        if full is not None:
            raise StreamFullError(
                f"{self._done.stored} groups are stored, then there was no more room: {full}. Delete history "
                "(`lachesis gc`), or raise the stream's budget and `lachesis init`; then repeat the command: it "
                "continues from there"
            )
        seq = await self._publish(group)
        self._budget.promise(ByteReservation(events=room.events, teacher=room.teacher))
        self._budget.landed(time.monotonic(), size)
        return seq

    async def _measure(self) -> None:
        now_s = time.monotonic()
        if now_s - self._measured_s >= _USAGE_S:
            self._budget.update(now_s, {name: await self._bus.usage(name) for name in MEASURED_STREAMS})
            self._measured_s = now_s

    async def _publish(self, group: RolloutGroup) -> int:
        subject, data = subjects.rollout(group.run, group.env), encode(group)
        headers = {PLAN_HEADER: Plan.of(group).pack(), TRACEPARENT_HEADER: traceparent(group.id, sampled=False)}
        msg_id = f"import.{group.run}.{group.id}"
        ack = await self._bus.publish_large(subject, data, msg_id=msg_id, headers=headers)
        while ack.duplicate and await self._is_gone(ack.seq):  # deleted, and the broker remembers its id still
            ack = await self._bus.publish_large(subject, data, msg_id=f"{msg_id}.after.{ack.seq}", headers=headers)
        if ack.duplicate:
            self._done.known += 1
        else:
            self._done.stored += 1
            self._done.untrainable += (
                group.sequences.logprobs is None or why_untrainable(group, self._limits) is not None
            )
            self._done.sequences += len(group.sequences)
            self._done.bytes += len(data)
        return ack.seq

    async def _is_gone(self, seq: int) -> bool:
        try:
            await self._bus.get_head(ROLLOUTS, seq)
        except NotFoundError:
            return True
        return False


def _part(groups: Iterator[PlacedGroup]) -> list[PlacedGroup]:
    """Return the next groups, few enough to be held; none at the end."""
    found, tokens = [], 0
    for placed in islice(groups, _MAX_READ_GROUPS):
        found.append(placed)
        tokens += placed.group.sequences.n_tokens if placed.group is not None else 0
        if tokens >= _MAX_READ_TOKENS:
            break
    return found
