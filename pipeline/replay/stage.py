"""A replay: selected history through scoring, normalization and advantages under a revision of its own, into REPLAY.

What goes in: rollouts, in the order of ROLLOUTS, one environment after the other. What comes out: `RescoreEvent`s, each
a fenced commit. Guarantees:

* nothing of the live run is touched: rollouts are read with a cursor of its own, nothing is acknowledged, every subject
  written names the revision;
* a replay that is killed, paused or refused at any point goes on at the next start behind its last commit, and what
  comes out is the same to the bit (given raters that answer the same), however often and wherever that happens;
* a finished one does nothing; the same name with another definition is refused; of two at once, one is;
* what it has yet to read is held back from trimming while it runs. A paused replay holds nothing.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import anyio
import msgspec
import tenacity
from anyio.streams.memory import MemoryObjectSendStream

from lachesis.pipeline.bus.api import Bus, Stored
from lachesis.pipeline.bus.background import background
from lachesis.pipeline.bus.newest import newest
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.flow.retention import holding, record
from lachesis.pipeline.replay.config import Pace
from lachesis.pipeline.replay.history import Found, feed, find
from lachesis.pipeline.replay.logic.fold import Fold
from lachesis.pipeline.replay.logic.selection import differences
from lachesis.pipeline.scoring.judge import EnvironmentScorer
from lachesis.pipeline.stage.commitlog import CommitLog
from lachesis.pipeline.stage.rollouts import read_rollout
from lachesis.schemas import subjects
from lachesis.schemas.annotations import GroupScore, Stamp
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import ConfigError, DataError, InfrastructureError, NotFoundError, StreamFullError
from lachesis.schemas.replay import Judges, RescoreEvent, RevisionRecord, Selection
from lachesis.schemas.subjects import REPLAY, ROLLOUTS

__all__ = ["Progress", "Replayed", "Request", "run_replay"]

STAGE = "replay"
_MOST_SAMPLES = 2048
"""Samples in one commit, about: what a kill repeats, at most."""
_LONGEST_S = 2.0
"""Seconds between commits, if ratings take long: what else a kill repeats."""
_OUTAGE_S = 60.0

Progress = Callable[[int, int], None]
"""Told how many groups are committed, of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to replay; `groups` is the list that `selection.groups` is the digest of."""

    revision: str
    selection: Selection
    groups: Collection[str] | None = None
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
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
    bus: Bus, config: RunConfig, request: Request, *, draining: anyio.Event, progress: Progress
) -> Replayed:
    """Score the selection under `revision` until it is done or `draining` is set; what is in flight is then finished.

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
    replay = _Replay(bus, config, request, draining)
    known = await replay.open()
    done = total = sum(replay.definition.groups.values())
    unscored = 0
    if not (known and replay.finished):
        name, needs = f"replay-{revision}"[:64], {ROLLOUTS: replay.needs()}
        async with holding(bus, config.run, name, needs, about=f"replay {revision}") as held:
            found = await replay.find(known=known)
            total = sum(replay.definition.groups.values())
            done = total - sum(map(len, found.values()))

            def committed(newly: int, without: int) -> None:
                nonlocal done, unscored
                done, unscored = done + newly, unscored + without
                held.needs[ROLLOUTS] = replay.needs()
                progress(done, total)

            progress(done, total)
            for env, wanted in found.items():
                await replay.score(env, wanted, committed)
    return Replayed(
        revision=revision,
        groups=done,
        total=total,
        unscored=unscored,
        finished=replay.finished,
        seconds=time.monotonic() - started,
        digest=replay.digest(),
    )


@dataclass(slots=True)
class _Env:
    """One environment: its judges, its fold and its commit log. `cursor`: the first sequence not committed."""

    scorer: EnvironmentScorer
    fold: Fold
    log: CommitLog[RescoreEvent]
    cursor: int


@dataclass(slots=True)
class _Slot:
    """A rollout on its way; they are folded in the order of reading."""

    found: Found
    score: GroupScore | None = None
    reason: str = ""
    done: anyio.Event = field(default_factory=anyio.Event)


class _Replay:
    definition: RevisionRecord

    def __init__(self, bus: Bus, config: RunConfig, request: Request, draining: anyio.Event) -> None:
        self._bus = bus
        self._config = config
        self._revision = request.revision
        self._selection = request.selection
        self._groups = request.groups
        self._pace = request.pace
        self._draining = draining
        self._term = f"{time.time_ns():x}"
        self._envs: dict[str, _Env] = {}
        self._due = 0.0
        self._expected = 0  # the last sequence on the subject of the definition

    async def open(self) -> bool:
        """Read what earlier starts left, and say whether there was any. Raises `ConfigError` where it was another."""
        run = self._config.run
        scorers = {env: self._scorer(env) for env in self._selection.envs}
        trimmed = (await record(self._bus, run)).trimmed.get(ROLLOUTS, 1)
        usage = await self._bus.usage(ROLLOUTS)
        first = self._selection.first_seq or max(1, trimmed)
        asked = self._define(scorers, first, max(1, min(self._selection.last_seq or usage.last, usage.last)))
        stored, _, self._expected = await newest(
            self._bus, REPLAY, subjects.revision(run, self._revision), RevisionRecord, lambda one: one.run == run
        )
        if stored is not None and (changed := differences(stored, asked)):
            raise ConfigError(
                f"revision {self._revision!r} exists and is another: {'; '.join(changed)}. A revision never changes: "
                "start another one, or repeat the command that began this one"
            )
        self.definition = stored or asked
        for env, scorer in scorers.items():
            self._envs[env] = await self._restore(env, scorer)
        return stored is not None

    def _scorer(self, env: str) -> EnvironmentScorer:
        settings = self._config.environments[env]
        return EnvironmentScorer(settings.scoring or self._config.scoring, settings)

    def _define(self, scorers: Mapping[str, EnvironmentScorer], first: int, last: int) -> RevisionRecord:
        environments = self._config.environments
        return RevisionRecord(
            run=self._config.run,
            revision=self._revision,
            selection=self._selection,
            first=first,
            last=last,
            groups={},
            judges={
                env: Judges(
                    ensemble=scorer.digest,
                    raters=scorer.versions,
                    success_rater=environments[env].success_rater,
                    success_threshold=environments[env].success_threshold,
                )
                for env, scorer in scorers.items()
            },
            normalization=msgspec.to_builtins(self._config.normalization),
            advantage={env: msgspec.to_builtins(self._config.advantage_of(env)) for env in scorers},
            created_ns=time.time_ns(),
        )

    async def _restore(self, env: str, scorer: EnvironmentScorer) -> _Env:
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
        fold = Fold(env, self._config.normalization, self._config.advantage_of(env))
        fold.restore(restored.state, restored.deltas)
        return _Env(scorer, fold, log, restored.cursors.get(ROLLOUTS, self.definition.first))

    # -- where it stands

    def needs(self) -> int:
        """Return the lowest sequence of ROLLOUTS that is yet to be read."""
        return min(env.cursor for env in self._envs.values())

    @property
    def finished(self) -> bool:
        return self.needs() > self.definition.last

    def digest(self) -> str:
        """Return what names every score and reward of the revision."""
        content = "\n".join(f"{name} {env.fold.digest}" for name, env in sorted(self._envs.items()))
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    async def find(self, *, known: bool) -> dict[str, list[Found]]:
        """Return by environment what is yet to be scored, and store the definition unless it is known.

        Raises `NotFoundError` where nothing is selected, or not all of the groups listed are there.
        """
        run, defined = self._config.run, self.definition
        found = {
            name: await find(
                self._bus, run, self._selection, self._groups, env=name, first=env.cursor, last=defined.last
            )
            for name, env in self._envs.items()
        }
        if known:
            return found
        self._check(found)
        self.definition = defined.replace(groups={env: len(wanted) for env, wanted in found.items()})
        subject = subjects.revision(run, self._revision)
        msg_id = f"revision.{subject}.{self._term}"
        await self._bus.commit(subject, encode(self.definition), expected=self._expected, msg_id=msg_id)
        return found

    def _check(self, found: Mapping[str, Sequence[Found]]) -> None:
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

    async def score(self, name: str, wanted: Sequence[Found], committed: Callable[[int, int], None]) -> None:
        """Score, fold and commit `wanted`, in order, until done or draining; what was folded is committed then too."""
        env = self._envs[name]
        slots = anyio.Semaphore(self._pace.max_inflight)
        send, receive = anyio.create_memory_object_stream[_Slot](self._pace.max_inflight)
        pending, reached, committed_s = 0, env.cursor, time.monotonic()
        with receive:
            async with background() as tasks:
                tasks.start_soon(self._feed, name, wanted, slots, send)
                async for slot in receive:
                    await slot.done.wait()
                    env.fold.add(slot.found.seq, slot.found.group, slot.score, slot.reason)
                    slots.release()
                    pending, reached = pending + 1, slot.found.seq + 1
                    if env.fold.fed >= _MOST_SAMPLES or time.monotonic() - committed_s >= _LONGEST_S:
                        committed(pending, await self._commit(name, reached))
                        pending, committed_s = 0, time.monotonic()
        if not wanted or reached > wanted[-1].seq:
            reached = self.definition.last + 1  # so that a finished replay holds no history and reads none again
        if reached > env.cursor:
            committed(pending, await self._commit(name, reached))

    async def _feed(
        self, name: str, wanted: Sequence[Found], slots: anyio.Semaphore, out: MemoryObjectSendStream[_Slot]
    ) -> None:
        """Read, and score as many at once as there are slots; they are handed on in the order of reading."""
        scorer = self._envs[name].scorer
        async with out, anyio.create_task_group() as scoring:

            async def take(found: Found, message: Stored) -> bool:
                await slots.acquire()
                await self._wait_turn()
                if self._draining.is_set():
                    return False
                slot = _Slot(found)
                scoring.start_soon(_score, slot, message, scorer)
                await out.send(slot)
                return True

            await feed(self._bus, self._config.run, name, wanted, take)

    async def _wait_turn(self) -> None:
        """Wait until another group may begin by `max_rate`, or it drains."""
        if self._pace.max_rate is not None:
            now = anyio.current_time()
            turn = max(self._due, now)
            self._due = turn + 1 / self._pace.max_rate
            with anyio.move_on_after(turn - now):
                await self._draining.wait()

    async def _commit(self, name: str, reached: int) -> int:
        """Store what was fed since the last commit, with `reached` as the next sequence to read; return how many of it
        have no score."""
        env = self._envs[name]
        folded = env.fold.step()
        cursors = {ROLLOUTS: reached}
        event = RescoreEvent(
            run=self._config.run,
            env=name,
            revision=self._revision,
            ensemble=env.scorer.digest,
            raters=env.scorer.versions,
            advantage=self._config.advantage_of(name).estimator,
            commit=env.log.next_commit(cursors, folded.delta),
            digest=env.fold.digest,
            scores=folded.scores,
            rewards=folded.rewards,
            unscored=folded.unscored,
        )
        try:
            await _retrying()(env.log.append, event)
            if env.log.snapshot_due:
                await _retrying()(env.log.snapshot, cursors, env.fold.state())
        except StreamFullError as error:
            raise StreamFullError(
                f"{error}; raise streams.replay_bytes, `lachesis init`, and repeat the command: it goes on where it was"
            ) from error
        env.cursor = reached
        return len(folded.unscored)


async def _score(slot: _Slot, message: Stored, scorer: EnvironmentScorer) -> None:
    start_ns = time.time_ns()
    try:
        rollout = read_rollout(message)
        try:
            score = await scorer.score(rollout.group, rollout.seq)
        except InfrastructureError:
            score = await _retrying()(scorer.score, rollout.group, rollout.seq)
        stamp = Stamp(STAGE, message.time_ns, start_ns, time.time_ns())
        slot.score = msgspec.structs.replace(score, stamps=[stamp])
    except DataError as error:
        slot.reason = f"{type(error).__name__}: {error}"
    slot.done.set()


def _retrying() -> tenacity.AsyncRetrying:
    """Retry what an outage failed, for a minute; a full stream stays full until somebody makes room."""
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(
            lambda error: isinstance(error, InfrastructureError) and not isinstance(error, StreamFullError)
        ),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=5.0),
        stop=tenacity.stop_after_delay(_OUTAGE_S),
        reraise=True,
    )
