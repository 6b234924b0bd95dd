"""Replays selected history: scores, normalizes and computes advantages, and writes them to REPLAY.

Reads rollouts in the order of ROLLOUTS, one environment after the other; if the selection has no end (a shadow), it
reads all of them as they are stored. Writes `RescoreEvent`s, each a fenced commit. Guarantees:

* nothing of the live run is touched: the replay reads rollouts with its own cursor, acknowledges nothing, and every
  subject that it writes names the revision;
* a replay that is killed, paused or refused at any point goes on behind its last commit at the next start, and its
  result is the same to the bit (given raters that answer the same), however often that happens;
* the number of processes that score changes nothing: they return only scores, and this one folds and commits them in
  order;
* a finished replay does nothing; the same name with another definition is refused, and so is the second of two at once;
* what it has yet to read is not trimmed while it runs. A paused replay holds nothing. A shadow's hold gives way if the
  run would have to wait for room; the shadow then ends rather than skip a rollout.
"""

import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
import msgspec

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.commit_ids import commit_id
from lachesis.pipeline.bus.config import Connection
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import NotFoundError, StreamFullError
from lachesis.pipeline.normalizer.estimators.loader import describe_estimator, load_estimator
from lachesis.pipeline.normalizer.logic.reward import RewardRule
from lachesis.pipeline.offline.replay.frames import WorkerStart
from lachesis.pipeline.offline.replay.inflight import BlockSize, InFlight, InFlightRollout
from lachesis.pipeline.offline.replay.logic.fold import FoldCommit, RewardFold
from lachesis.pipeline.offline.replay.logic.rollout_filter import differences
from lachesis.pipeline.offline.replay.outage import retrying
from lachesis.pipeline.offline.replay.pace import ReplayPace
from lachesis.pipeline.offline.replay.results import joined_digest
from lachesis.pipeline.offline.replay.revisions import ensembles_of, overridden_normalizations
from lachesis.pipeline.offline.replay.scoring import STAGE, ReplayScorer, ScoreOrReason
from lachesis.pipeline.offline.replay.selected import SelectedRollout, Take, feed, find, follow
from lachesis.pipeline.offline.replay.worker_pool import WorkerPool, open_workers
from lachesis.pipeline.retention.holds import holding, read_record
from lachesis.pipeline.runtime.commitlog import CommitLog
from lachesis.pipeline.runtime.retries import OutageRetries
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.replay import RescoreEvent, RevisionRecord, Selection
from lachesis.schemas.retention import Retention
from lachesis.schemas.subjects import REPLAY, ROLLOUTS

__all__ = ["Observer", "Progress", "ReplayProgress", "ReplayRequest", "run_replay"]

_MAX_SAMPLES_PER_COMMIT = 2048
"""Samples in one commit, about: what a kill repeats, at most."""
_MAX_COMMIT_S = 2.0
"""Seconds between commits, if ratings take long: what else a kill repeats."""
_FULL_SHARE = 0.8
"""Share of the budget of REPLAY from which a shadow drops the oldest that it has written."""
_MAX_SEQUENCES_AHEAD = 1024
"""Sequences that the others come ahead of an environment without rollouts before it is committed all the same."""

Progress = Callable[[int, int], None]
"""Called with how many groups are committed, of how many; without an end both count those of this start."""

Observer = Callable[[str, int, FoldCommit], None]
"""Called with what was committed: of which environment, the next sequence to read, and the scores and rewards."""

Committed = Callable[[str, int, int, FoldCommit], None]
"""As `Observer`, with the number of groups as well."""

Source = Callable[[Take], Awaitable[None]]
"""Hands rollouts out, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What to replay; `groups` is the list that `selection.groups` is the digest of."""

    revision: str
    selection: Selection
    groups: Collection[str] | None = None
    pace: ReplayPace = field(default_factory=ReplayPace)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayProgress:
    """Where the revision stands. `digest` names all scores and rewards of all environments; `unscored` and `seconds`
    are of this start alone."""

    revision: str
    groups: int
    total: int
    unscored: int
    finished: bool
    seconds: float
    digest: str


async def run_replay(
    bus: Bus,
    config: RunConfig,
    request: ReplayRequest,
    *,
    draining: anyio.Event,
    progress: Progress,
    observe: Observer = lambda _env, _reached, _folded: None,
    connection: Connection | None = None,
) -> ReplayProgress:
    """Score the selection under `revision` until it is done or `draining` is set.

    What is in flight is then finished.

    `connection` is what workers connect with; without it, and where the selection has no end, there are none.

    Raises `ConfigError` where the revision is another already, or nothing can be one; `NotFoundError` where history is
    gone or nothing is selected; `StreamFullError`; `FencedError` when another replay writes the same revision.
    """
    started = time.monotonic()
    revision, selection = subjects.check_name("revision", request.revision), request.selection
    if revision in {config.revision, subjects.LIVE}:
        raise ConfigError(f"revision {revision!r} is the live run's; give the replay a name of its own")
    unknown = sorted(set(selection.envs) - set(config.environments))
    if unknown:
        raise ConfigError(f"there is no environment {unknown[0]!r}; there are {', '.join(config.environments)}")
    done = total = unscored = 0

    def committed(env: str, reached: int, groups: int, folded: FoldCommit) -> None:
        nonlocal done, unscored
        done, unscored = done + groups, unscored + len(folded.unscored)
        held.needs[ROLLOUTS] = replay.needs()
        observe(env, reached, folded)
        progress(done, max(done, total))

    replay = _Replay(bus, config, request, draining, committed)
    known = await replay.open()
    done = total = sum(replay.definition.groups.values())
    if not (known and replay.finished):
        what, needs = "shadow" if selection.follow else "replay", {ROLLOUTS: replay.needs()}
        about = f"{what} {revision}"
        async with holding(bus, config.run, what, needs, about=about, yields=selection.follow) as held:
            if selection.follow:
                await replay.store_definition({}, known=known)
                progress(0, 0)
                await replay.follow()
            else:
                async with replay.workers(connection) as workers:  # which load while history is searched
                    found = await replay.find(known=known)
                    total = sum(replay.definition.groups.values())
                    done = total - sum(map(len, found.values()))
                    progress(done, total)
                    for env, wanted in found.items():
                        await replay.replay(env, wanted, workers)
    return ReplayProgress(
        revision=revision,
        groups=done,
        total=max(done, total),
        unscored=unscored,
        finished=replay.finished,
        seconds=time.monotonic() - started,
        digest=replay.digest(),
    )


@dataclass(slots=True)
class _EnvReplay:
    """One environment: its fold and its commit log. `cursor`: the first sequence not committed, `pending`: groups
    folded since the last commit."""

    fold: RewardFold
    log: CommitLog[RescoreEvent]
    cursor: int
    pending: int = 0


class _Replay:
    definition: RevisionRecord

    def __init__(
        self, bus: Bus, config: RunConfig, request: ReplayRequest, draining: anyio.Event, committed: Committed
    ) -> None:
        self._bus = bus
        self._config = config
        self._revision = request.revision
        self._selection = request.selection
        self._groups = request.groups
        self._pace = request.pace
        self._draining = draining
        self._committed = committed
        self._term = f"{time.time_ns():x}"
        self._scorer = ReplayScorer(config, request.selection.envs, self._retrying)
        self._envs: dict[str, _EnvReplay] = {}
        self._committing = anyio.Lock()
        # settled, in order: more than one commit may hold
        self._unfolded: deque[tuple[SelectedRollout, ScoreOrReason]] = deque()
        self._reached = 0  # the next sequence to fold
        self._expected = 0  # the last sequence on the subject of the definition

    async def open(self) -> bool:
        """Read what earlier starts left, and say whether there was any. Raises `ConfigError` where it was another."""
        run = self._config.run
        trimmed = (await read_record(self._bus, run)).trimmed.get(ROLLOUTS, 1)
        usage = await self._bus.usage(ROLLOUTS)
        follows = self._selection.follow
        first = self._selection.first_seq or max(usage.last + 1 if follows else 1, trimmed)
        last = None if follows else max(1, min(self._selection.last_seq or usage.last, usage.last))
        asked = self._define(first, last)
        stored, _, self._expected = await read_last_event(
            self._bus,
            REPLAY,
            subjects.revision(run, self._revision),
            RevisionRecord,
            lambda one: one.run == run,
            newer="refuse",
        )
        if stored is not None and (changed := differences(stored, asked)):
            raise ConfigError(
                f"revision {self._revision!r} exists and is another: {'; '.join(changed)}. A revision never changes: "
                "start another one, or repeat the command that began this one"
            )
        self.definition = stored or asked
        for env in self._selection.envs:
            self._envs[env] = await self._restore(env)
        return stored is not None

    def _define(self, first: int, last: int | None) -> RevisionRecord:
        envs = self._selection.envs
        return RevisionRecord(
            run=self._config.run,
            revision=self._revision,
            selection=self._selection,
            first=first,
            last=last,
            groups={},
            judges=ensembles_of(self._config, self._scorer.scorers),
            normalization=msgspec.to_builtins(self._config.normalization),
            normalizations=overridden_normalizations(self._config, envs),
            advantage={env: describe_estimator(self._config.advantage_of(env)) for env in envs},
            created_ns=time.time_ns(),
        )

    async def _restore(self, env: str) -> _EnvReplay:
        run = self._config.run
        log, restored = await CommitLog.open(
            self._bus,
            RescoreEvent,
            lambda event: event.commit,
            subject=subjects.replay("rescore", run, self._revision, env),
            state_subject=subjects.state(run, STAGE, self._revision, env),
            stage=STAGE,
            term=self._term,
            stream=REPLAY,
        )
        config, reliability = self._config, self._config.scoring_of(env).weighs_by_reliability
        rule = RewardRule(config.advantage_of(env), config.reward_config_of(env), reliability=reliability)
        fold = RewardFold(env, config.normalization_of(env), rule)
        fold.restore(restored.state, restored.deltas)
        return _EnvReplay(fold, log, restored.cursors.get(ROLLOUTS, self.definition.first))

    # -- where it stands

    def needs(self) -> int:
        """Return the lowest sequence of ROLLOUTS that is yet to be read."""
        return min(env.cursor for env in self._envs.values())

    @property
    def finished(self) -> bool:
        return self.definition.last is not None and self.needs() > self.definition.last

    def digest(self) -> str:
        """Return what names every score and reward of the revision."""
        return joined_digest({name: env.fold.digest for name, env in self._envs.items()})

    async def find(self, *, known: bool) -> dict[str, list[SelectedRollout]]:
        """Return by environment what is yet to be scored, and store the definition unless it is known.

        Raises `NotFoundError` where nothing is selected, or not all of the groups listed are there.
        """
        run, defined = self._config.run, self.definition
        found = {
            name: await find(
                self._bus, run, self._selection, self._groups, env=name, first=env.cursor, last=defined.last or 0
            )
            for name, env in self._envs.items()
        }
        if not known:
            self._check(found)
        await self.store_definition({env: len(wanted) for env, wanted in found.items()}, known=known)
        return found

    async def store_definition(self, groups: dict[str, int], *, known: bool) -> None:
        """Store the definition, of so many groups by environment, unless it is known."""
        if known:
            return
        self.definition = self.definition.replace(groups=groups)
        subject = subjects.revision(self._config.run, self._revision)
        msg_id = commit_id(f"revision.{subject}.{self._term}")
        await self._bus.commit(subject, encode(self.definition), expected=self._expected, msg_id=msg_id)

    def _check(self, found: Mapping[str, Sequence[SelectedRollout]]) -> None:
        first, last = self.definition.first, self.definition.last
        where = f"run {self._config.run}, {', '.join(self._envs)}, sequences {first} to {last} of {ROLLOUTS}"
        seen = {one.group for wanted in found.values() for one in wanted}
        missing = sorted(set(self._groups or ()) - seen)
        if missing:
            raise NotFoundError(
                f"{len(missing)} of the {len(self._groups or ())} groups listed are not selected in {where}: "
                f"{missing[0]}{' and others' if len(missing) > 1 else ''}; take them off the list or select more"
            )
        if not seen:
            raise NotFoundError(
                f"nothing is selected in {where}; `lachesis tail rollout --since-start` shows what is there"
            )

    # -- work

    @asynccontextmanager
    async def workers(self, connection: Connection | None) -> AsyncIterator[WorkerPool | None]:
        """Yield the workers, None where this process is to score."""
        if connection is None or self._pace.workers == 1 or self.finished:
            yield None
            return
        start = WorkerStart.of(
            config=self._config,
            ensembles={env: scorer.digest for env, scorer in self._scorer.scorers.items()},
            connection=connection,
            path=[str(folder) for folder in sys.path],
        )
        async with open_workers(start, self._pace.workers) as workers:
            yield workers

    async def replay(self, name: str, wanted: Sequence[SelectedRollout], workers: WorkerPool | None) -> None:
        """Score and commit `wanted`, in order, until done or draining."""
        if workers is None:
            source = partial(feed, self._bus, self._config.run, name, wanted)
            await self._work([name], partial(self._score_here, [name], source))
        else:
            await self._work([name], partial(self._score_in_workers, [name], workers, wanted))
        if not wanted or self._reached > wanted[-1].seq:
            # so that a finished replay holds no history and reads none again
            self._reached = (self.definition.last or 0) + 1
        if self._reached > self._envs[name].cursor:
            await self._commit(name)

    async def follow(self) -> None:
        """Score and commit whatever is stored, of all environments, until draining."""
        cursors = {name: env.cursor for name, env in self._envs.items()}
        source = partial(follow, self._bus, self._config.run, self._selection, cursors)
        await self._work(list(self._envs), partial(self._score_here, list(self._envs), source))
        for name, env in self._envs.items():
            if self._reached > env.cursor:
                await self._commit(name)

    async def _work(self, envs: Sequence[str], score_all: Callable[[], Awaitable[None]]) -> None:
        """Score and fold, committing now and then, but not what was folded last."""
        self._reached = min(self._envs[name].cursor for name in envs)
        async with background() as tasks:
            tasks.start_soon(self._commit_now_and_then, envs)
            await score_all()
            await self._commit_full(envs)
            await self._committing.acquire()  # a commit under way is not broken off
        self._committing.release()

    async def _score_here(self, envs: Sequence[str], source: Source) -> None:
        """Score what `source` hands out in this process."""
        in_flight = self._in_flight(envs)

        async def score(slot: InFlightRollout, message: StoredMessage) -> None:
            in_flight.settle_rollout(slot, await self._scorer.score_rollout(slot.found.env, message))

        async def take(found: SelectedRollout, message: StoredMessage) -> bool:
            await self._commit_full(envs)
            slot = await in_flight.begin(found, len(message.data))
            if slot is None:
                return False
            if self._scorer.is_asynchronous(found.env):
                scoring.start_soon(score, slot, message)
            else:  # beside what never waits nothing else could be scored
                await score(slot, message)
            return True

        async with anyio.create_task_group() as scoring, background() as tasks:
            tasks.start_soon(self._cancel_when_draining, tasks.cancel_scope)
            await source(take)

    async def _score_in_workers(
        self, envs: Sequence[str], workers: WorkerPool, wanted: Sequence[SelectedRollout]
    ) -> None:
        """Let workers read and score `wanted`."""
        in_flight = self._in_flight(envs)
        blocks = BlockSize(self._pace, waits=self._is_asynchronous(envs))

        async def score(slots: Sequence[InFlightRollout]) -> None:
            reply = await workers.score_block([slot.found for slot in slots])
            blocks.answered(len(slots), reply.seconds)
            for slot, verdict in zip(slots, reply.verdicts, strict=True):
                in_flight.settle_rollout(slot, verdict)

        async with anyio.create_task_group() as scoring, background() as tasks:
            tasks.start_soon(self._cancel_when_draining, tasks.cancel_scope)
            first = 0
            while first < len(wanted):
                size = await blocks.begin()
                slots = []
                for found in wanted[first : first + size]:
                    await self._commit_full(envs)
                    slot = await in_flight.begin(found, 0)
                    if slot is None:
                        return
                    slots.append(slot)
                first += size
                scoring.start_soon(score, slots)

    def _in_flight(self, envs: Sequence[str]) -> InFlight:
        most = self._pace.in_flight(waits=self._is_asynchronous(envs))
        return InFlight(most, self._pace.max_rate, self._draining, self._settled)

    def _is_asynchronous(self, envs: Sequence[str]) -> bool:
        return any(self._scorer.is_asynchronous(env) for env in envs)

    async def _cancel_when_draining(self, scope: anyio.CancelScope) -> None:
        await self._draining.wait()
        async with self._committing:  # a commit under way is not broken off
            scope.cancel()

    def _settled(self, found: SelectedRollout, verdict: ScoreOrReason) -> None:
        self._unfolded.append((found, verdict))
        self._fold()

    def _fold(self) -> None:
        """Fold what is settled, in order, as far as the next commits may hold it."""
        while self._unfolded:
            found, verdict = self._unfolded[0]
            env = self._envs[found.env]
            if env.fold.fed >= _MAX_SAMPLES_PER_COMMIT:
                return
            self._unfolded.popleft()
            env.fold.add_group(found.seq, found.group, verdict.score, verdict.reason)
            env.pending += 1
            self._reached = found.seq + 1

    async def _commit_now_and_then(self, envs: Sequence[str]) -> None:
        while True:
            await anyio.sleep(_MAX_COMMIT_S)
            for name in envs:
                env = self._envs[name]
                # one that is silent moves on with the others, so that it does not hold back history without rollouts
                # of it
                if env.fold.fed or self._reached - env.cursor >= _MAX_SEQUENCES_AHEAD:
                    await self._commit(name)

    async def _commit_full(self, envs: Sequence[str]) -> None:
        """Commit where as much was fed as one commit may hold, until all that is settled is folded."""
        while full := [name for name in envs if self._envs[name].fold.fed >= _MAX_SAMPLES_PER_COMMIT]:
            for name in full:
                await self._commit(name)

    async def _commit(self, name: str) -> None:
        """Store what was fed since the last commit."""
        await self._committing.acquire()
        env = self._envs[name]
        if self._selection.follow:
            await self._check_kept(env)
        # what is folded while this is stored belongs to the next one
        folded, reached, groups, env.pending = env.fold.step(), self._reached, env.pending, 0
        self._fold()
        scorer, cursors = self._scorer.scorers[name], {ROLLOUTS: reached}
        event = RescoreEvent(
            run=self._config.run,
            env=name,
            revision=self._revision,
            ensemble=scorer.digest,
            raters=scorer.versions,
            advantage=load_estimator(self._config.advantage_of(name)).name,
            commit=env.log.next_commit(cursors, folded.delta),
            digest=env.fold.digest,
            scores=folded.scores,
            rewards=folded.rewards,
            unscored=folded.unscored,
        )
        await self._store(name, event, cursors)
        env.cursor = reached
        self._committed(name, reached, groups, folded)
        self._committing.release()  # not after an error: what was to be stored is not in the fold any more

    async def _store(self, name: str, event: RescoreEvent, cursors: dict[str, int]) -> None:
        env = self._envs[name]
        try:
            stored: int = await self._retrying(f"commit results of {name}")(env.log.append, event)
            if env.log.snapshot_due:
                await self._retrying(f"write a snapshot of {name}")(env.log.snapshot, cursors, env.fold.state())
                if self._selection.follow:
                    await self._retrying(f"trim what {name} needs no more")(self._make_room, name, stored)
        except StreamFullError as error:
            raise StreamFullError(
                f"{error}; raise streams.replay_bytes, `lachesis init`, and repeat the command: it continues where it "
                "stopped"
            ) from error

    async def _make_room(self, name: str, covered: int) -> None:
        """Let the older half of what was written of an environment go once REPLAY is nearly full: what has no end must
        not fill it. All from `covered` on stays, which a start reads."""
        usage = await self._bus.usage(REPLAY)
        if usage.max_bytes <= 0 or usage.bytes < _FULL_SHARE * usage.max_bytes:
            return
        written = subjects.replay("rescore", self._config.run, self._revision, name)
        async with self._bus.read(REPLAY, [written], headers_only=True, follow=False) as messages:
            async for first in messages:
                await self._bus.trim(REPLAY, [written], before=(first.seq + covered) // 2 + 1)
                return

    async def _check_kept(self, env: _EnvReplay) -> None:
        """Raise `NotFoundError` unless all that was read since the last commit was there: `follow` does not notice."""
        kept: Retention = await self._retrying("read what is trimmed")(read_record, self._bus, self._config.run)
        if kept.trimmed.get(ROLLOUTS, 1) > env.cursor:
            raise NotFoundError(
                f"run {self._config.run} needed the room and trimmed {ROLLOUTS} below sequence "
                f"{kept.trimmed[ROLLOUTS]}, and revision {self._revision} had come to {env.cursor}: it is too slow for "
                "the run. Start another revision, with cheaper raters, more --max-inflight, or larger "
                "streams.rollouts_bytes"
            )

    def _retrying(self, what: str) -> OutageRetries:
        """Wait an outage out: one that follows the run for as long as it may."""
        return retrying(what, self._draining if self._selection.follow else None)
