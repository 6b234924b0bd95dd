"""The normalizer: memberships and scores in, rewards with advantages out, one fenced commit for each burst of input.

One writer an environment. Memberships come from the headers of ROLLOUTS, outcomes from EVENTS (scores, and the dead
letters of groups that will never have any). A commit holds the rewards that became ready, the change of the
normalizer's state and the positions from which a restart reads again, so a crash repeats nothing and loses nothing.
After a promotion each revision's rollouts are normalized by themselves, and committed by themselves.
"""

import logging
from collections.abc import Sequence

import anyio

from lachesis.pipeline.bus.api import Stored, StreamUsage
from lachesis.pipeline.bus.background import background
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.promotion.record import InForce, under
from lachesis.pipeline.rewards.logic.generations import Change, Generations, Terms, promotions_in
from lachesis.pipeline.rewards.logic.normalizer import Ready
from lachesis.pipeline.rewards.logic.reward import RewardRule, reliability_shares, shaping_metrics
from lachesis.pipeline.rewards.lost import LostScores
from lachesis.pipeline.rewards.rules import reward_rule
from lachesis.pipeline.stage.commitlog import CommitLog
from lachesis.pipeline.stage.deadletter import dead_letter, publish_dead_letter
from lachesis.pipeline.stage.inputs import Source, open_bursts, take_bursts
from lachesis.pipeline.stage.service import Service
from lachesis.pipeline.telemetry.messages import process_id, publish_span, stage_spans
from lachesis.pipeline.telemetry.spans import Times
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, GroupReward, GroupScore, RewardEvent, ScoreEvent, Stamp
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import DataError, LedgerError, VersionError
from lachesis.schemas.plan import PLAN_HEADER, Plan
from lachesis.schemas.promotion import Promotion
from lachesis.schemas.values import unpack

__all__ = ["run_normalizer"]

log = logging.getLogger("lachesis")

_LOOKS = 40
_LOOK_AGAIN_S = 0.25


async def run_normalizer(service: Service, config: RunConfig) -> None:
    """Normalize every environment of the run until the service drains."""
    async with anyio.create_task_group() as tasks:
        for env in config.environments:
            tasks.start_soon(_run_env, service, config, env)


async def _run_env(service: Service, config: RunConfig, env: str) -> None:
    writer = await _EnvWriter.open(service, config, env)
    run, revision = service.run, service.revision
    sources = [
        Source(subjects.ROLLOUTS, [subjects.rollout(run, env)], writer.cursors[subjects.ROLLOUTS], headers_only=True),
        Source(
            subjects.EVENTS,
            [subjects.event("score", run, revision, env), subjects.event("dead", run, revision, env)],
            writer.cursors[subjects.EVENTS],
        ),
    ]
    async with open_bursts(service, sources) as bursts, background() as tasks:
        tasks.start_soon(writer.lost.give_up)
        await take_bursts(service, bursts, writer.take_burst)


class _EnvWriter:
    """The single writer of one environment's rewards. `cursors`: first sequence to read again, by stream."""

    def __init__(self, service: Service, config: RunConfig, env: str, log: CommitLog[RewardEvent]) -> None:
        self.service = service
        self.config = config
        self.env = env
        self.log = log
        self.normalizer = Generations(env, self._terms(config))
        self.in_force = InForce(service.bus, service.run, service.revision)
        self.cursors = {subjects.ROLLOUTS: 1, subjects.EVENTS: 1}
        self._scores: dict[tuple[str, int], tuple[GroupScore, int]] = {}  # by group and sequence in EVENTS
        self._events_read = 0
        self.lost = LostScores(service, env, self.normalizer, deadline_s=config.batching.lost_deadline_s)

    @classmethod
    async def open(cls, service: Service, config: RunConfig, env: str) -> "_EnvWriter":
        """Return the writer with the state its predecessors committed."""
        log, restored = await CommitLog.open(
            service.bus,
            RewardEvent,
            lambda event: event.commit,
            subject=subjects.event("reward", service.run, service.revision, env),
            state_subject=subjects.state(service.run, "normalizer", service.revision, env),
            stage="normalizer",
            term=service.instance,
        )
        writer = cls(service, config, env, log)
        writer.cursors.update(restored.cursors)
        state = unpack("normalizer state", restored.state) if restored.state is not None else None
        deltas = [unpack("normalizer delta", delta) for delta in restored.deltas]
        known_to = max([writer.cursors[subjects.ROLLOUTS] - 1, *promotions_in(state, deltas)])
        async for attempt in service.retrying("read the promotions"):
            with attempt:
                found = await writer.in_force.known(known_to)
        writer.normalizer.restore(state, deltas, writer._terms_of(found))
        # where there is a promotion, a revision's first may have been folded by another, before it was known here
        if not writer.normalizer.switched and writer.cursors[subjects.ROLLOUTS] != writer.normalizer.watermark:
            raise LedgerError(
                f"normalizer of {env}: its state reaches to rollout {writer.normalizer.watermark}, its last commit to "
                f"{writer.cursors[subjects.ROLLOUTS]}: they are not of one history; start another revision"
            )
        writer._events_read = writer.cursors[subjects.EVENTS] - 1
        writer.lost.start(writer.cursors)
        return writer

    async def _promote(self, first: int) -> None:
        """Make the promotion known that begins with `first`. Raises `DataError` where there is none."""
        found: Promotion | None = None
        if await self._is_stored(first):
            async for attempt in self.service.retrying("read the promotions"):
                with attempt:
                    found = await self.in_force.at(first)
        if found is None or found.first != first:
            raise DataError(f"scores are of a promotion from sequence {first} on, and there is none")
        for known, terms in sorted(self._terms_of(await self.in_force.known(first)).items()):
            self.normalizer.promote(known, terms)
        log.info("%s: revision %s judges rollouts from sequence %d on", self.env, found.revision, first)

    async def _is_stored(self, seq: int) -> bool:
        """Whether ROLLOUTS goes so far. A server that lags behind has some seconds to catch up."""
        for _ in range(_LOOKS):
            usage: StreamUsage = await self.service.retrying("read ROLLOUTS")(self.service.bus.usage, subjects.ROLLOUTS)
            if usage.last >= seq:
                return True
            await anyio.sleep(_LOOK_AGAIN_S)
        return False

    def _terms(self, config: RunConfig) -> Terms:
        return Terms(config.normalization_of(self.env), reward_rule(config, self.env))

    def _terms_of(self, promotions: Sequence[Promotion]) -> dict[int, Terms]:
        return {one.first: self._terms(under(one, self.config)) for one in promotions if one.first is not None}

    async def take_burst(self, burst: list[Stored]) -> None:
        """Feed a burst of input and commit what follows from it."""
        for message in burst:
            await self.take(message)
        await self.commit()

    async def take(self, message: Stored) -> None:
        """Feed one input message. A message that cannot be read is a dead letter."""
        if message.stream == subjects.EVENTS:
            self._events_read = message.seq
        try:
            if message.stream == subjects.ROLLOUTS:
                plan = Plan.unpack(message.headers.get(PLAN_HEADER))
                self.normalizer.member(message.seq, plan.group)
            elif message.subject.startswith("rl.dead."):
                letter = decode(DeadLetter, message.data)
                if letter.ends_rollout and letter.group is not None:
                    self.normalizer.outcome(letter.group, letter.seq, None, source=message.seq)
            else:
                event = decode(ScoreEvent, message.data)
                if event.promoted is not None and not self.normalizer.knows(event.promoted):
                    await self._promote(event.promoted)
                for score in event.groups:
                    await self._take_score(score, message, event.promoted)
        except VersionError:
            raise  # the run's own services wrote it: wait for the upgrade, with the message unread
        except DataError as error:
            await self._bury(dead_letter(self.service, message, "data", error))
            if message.stream == subjects.EVENTS:
                await self.lost.add(message)
        self.lost.read(message)

    async def _take_score(self, score: GroupScore, message: Stored, promoted: int | None) -> None:
        try:
            rule = self.normalizer.rule(promoted)
            self.normalizer.outcome(score.group, score.seq, rule.columns(score), source=message.seq, promoted=promoted)
        except DataError as error:  # the group is dead, not the message: its letter comes back and closes its window
            letter = dead_letter(self.service, message, "data", error)
            await self._bury(letter.replace(stream=subjects.ROLLOUTS, seq=score.seq, group=score.group))
        else:
            self._scores.setdefault((score.group, message.seq), (score, message.time_ns))

    async def _bury(self, letter: DeadLetter) -> None:
        await self.service.retrying("publish a dead letter")(publish_dead_letter, self.service, letter)
        self.service.vitals.dead += 1

    async def commit(self) -> None:
        """Write what became ready and what changed, if anything did."""
        while (step := self.normalizer.step()) is not None:
            await self._commit(step)
            self.normalizer.forget_done()

    async def _commit(self, step: Change) -> None:
        start_ns = self.service.now_ns()
        needed = (self.normalizer.oldest_source(), self.lost.oldest_source(), self._events_read + 1)
        self.cursors = {
            subjects.ROLLOUTS: max(self.cursors[subjects.ROLLOUTS], self.normalizer.watermark),
            subjects.EVENTS: min(source for source in needed if source is not None),
        }
        rule = step.generation.rule
        event = RewardEvent(
            run=self.service.run,
            env=self.env,
            revision=self.service.revision,
            advantage=rule.advantage.estimator,
            commit=self.log.next_commit(self.cursors, step.delta),
            groups=[self._reward(ready, rule, start_ns) for ready in step.ready],
            promoted=step.generation.promoted,
        )
        committed_ns = self.service.now_ns()
        seq: int = await self.service.retrying("commit rewards")(self.log.append, event)
        sources = [ready.source for ready in step.ready]
        self._trace(event.groups, sources, seq, (committed_ns, self.service.now_ns()))
        self.service.recovered()
        folded = self.normalizer.watermark
        self._scores = {key: held for key, held in self._scores.items() if held[0].seq >= folded}
        self.service.vitals.emitted += len(step.ready)
        self.service.vitals.metrics.update(self.normalizer.metrics() | shaping_metrics(self.env, event.groups))
        shares = reliability_shares(self.normalizer.snapshot()).items()
        self.service.vitals.metrics.update({f"reliability/{self.env}/{name}": share for name, share in shares})
        if self.log.snapshot_due:
            await self.service.retrying("write a snapshot")(self.log.snapshot, self.cursors, self.normalizer.state())

    def _trace(self, rewards: Sequence[GroupReward], sources: Sequence[int], seq: int, times: Times) -> None:
        """Export the spans of the sampled groups of a commit stored at `seq`; `sources`: where their scores are."""
        service, server = self.service, self.service.bus.server
        taken = subjects.event("score", service.run, service.revision, self.env)
        given = subjects.event("reward", service.run, service.revision, self.env)
        for reward, source in zip(rewards, sources, strict=True):
            if not service.tracing.sampled(reward.group):
                continue
            stamp = reward.stamps[-1]
            parent = process_id(reward.group, service.name, stamp.attempt)
            published = publish_span(
                service.name, reward.group, parent, given, times,
                server=server, message=f"{subjects.EVENTS}:{seq}", size=self.log.appended_bytes,
            )  # fmt: skip
            about = {"messaging.message.id": f"{subjects.EVENTS}:{source}"}
            service.tracing.emit([*stage_spans(reward.group, stamp, taken, about, server=server), published])

    def _reward(self, ready: Ready, rule: RewardRule, start_ns: int) -> GroupReward:
        score, stored_ns = self._scores.pop((ready.group, ready.source))
        stamp = Stamp(self.service.name, stored_ns, start_ns, self.service.now_ns())
        self.service.vitals.done(stamp, traced=ready.group if self.service.tracing.sampled(ready.group) else None)
        return rule.reward(ready, score, stamp)
