"""The normalizer: turns scores into rewards and advantages, one fenced commit for each burst.

One writer an environment. Memberships come from the headers of ROLLOUTS, outcomes from EVENTS (scores, and the dead
letters of groups that will never have any). A commit holds the rewards that became ready, the change of the
normalizer's state and the positions from which a restart reads again, so a crash repeats nothing and loses nothing.
After a promotion each revision's rollouts are normalized and committed separately.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import anyio

from lachesis.pipeline.bus.api import StoredMessage, StreamUsage
from lachesis.pipeline.errors import InfrastructureError, LedgerError
from lachesis.pipeline.normalizer.logic.normalizer import ReadyGroup
from lachesis.pipeline.normalizer.logic.revision_normalizers import (
    NormalizerChange,
    RevisionNormalizers,
    RewardTerms,
    promotions_in,
)
from lachesis.pipeline.normalizer.logic.reward import RewardRule, reliability_shares, shaping_metrics
from lachesis.pipeline.normalizer.settings import EnvRewardSettings, NormalizerSettings
from lachesis.pipeline.normalizer.unjoined import UnjoinedScores
from lachesis.pipeline.promotion.record import ActivePromotion
from lachesis.pipeline.runtime.commitlog import RestoredState
from lachesis.pipeline.runtime.dead_letters import dead_letter, store_dead_letter
from lachesis.pipeline.runtime.inputs import InputSource, read_to_end
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stateful import BackgroundTask, CommitReceipt, StatefulStage, run_stateful
from lachesis.pipeline.telemetry.messages import process_id, publish_span, stage_spans
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, GroupReward, GroupScore, RewardEvent, ScoreEvent, Stamp
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.promotion import Promotion
from lachesis.schemas.values import unpack

__all__ = ["RewardWriter", "run_normalizer"]

log = logging.getLogger("lachesis")

_MAX_AHEAD = 4096  # scores held for rollouts not read yet, before these are read to the end
_MAX_POLLS = 40
_POLL_S = 0.25


async def run_normalizer(service: Service, settings: NormalizerSettings) -> None:
    """Normalize every environment of the run until the service drains."""
    await run_stateful(RewardWriter(service, settings, env) for env in settings.environments)


def _terms(settings: EnvRewardSettings) -> RewardTerms:
    return RewardTerms(settings.normalization, settings.rule())


class RewardWriter(StatefulStage[RewardEvent]):
    """The single writer of one environment's rewards."""

    name = "normalizer"
    kind = "reward"

    def __init__(self, service: Service, settings: NormalizerSettings, env: str) -> None:
        super().__init__(service, env, RewardEvent, (subjects.ROLLOUTS, subjects.EVENTS))
        self.settings = settings
        self.normalizer = RevisionNormalizers(env, _terms(settings.environments[env]))
        self.in_force = ActivePromotion(service.bus, service.run, service.revision)
        self._scores: dict[tuple[str, int], tuple[GroupScore, int]] = {}  # by group and sequence in EVENTS
        self._sources: list[int] = []  # where the scores of what is being committed are
        self._events_read = 0
        self._members_read = 0
        self.unjoined = UnjoinedScores(
            service, env, self.normalizer, deadline_s=settings.lost_deadline_s, forget=self._forget
        )

    async def restore(self, restored: RestoredState) -> None:
        """Take over the state, with the promotions that it knows of."""
        state = unpack("normalizer state", restored.state) if restored.state is not None else None
        deltas = [unpack("normalizer delta", delta) for delta in restored.deltas]
        known_to = max([self.cursors[subjects.ROLLOUTS] - 1, *promotions_in(state, deltas)])
        async for attempt in self.service.retrying("read the promotions"):
            with attempt:
                terms = self._terms_of(await self.in_force.promotions_known_at(known_to))
        self.normalizer.restore(state, deltas, terms)
        # where there is a promotion, a revision's first may have been folded by another, before it was known here
        if not self.normalizer.has_promotions and self.cursors[subjects.ROLLOUTS] != self.normalizer.watermark:
            raise LedgerError(
                f"normalizer of {self.env}: its state reaches to rollout {self.normalizer.watermark}, its last commit "
                f"to {self.cursors[subjects.ROLLOUTS]}: they are not of one history; start another revision"
            )
        self._events_read = self.cursors[subjects.EVENTS] - 1
        self._members_read = self.cursors[subjects.ROLLOUTS] - 1
        self.unjoined.start(self.cursors)

    def sources(self) -> list[InputSource]:
        """Return the headers of rollouts, and the events that say how each rollout ended."""
        run, revision, env = self.service.run, self.service.revision, self.env
        outcomes = [subjects.event("score", run, revision, env), subjects.event("dead", run, revision, env)]
        return [
            InputSource(
                subjects.ROLLOUTS, [subjects.rollout(run, env)], self.cursors[subjects.ROLLOUTS], headers_only=True
            ),
            InputSource(subjects.EVENTS, outcomes, self.cursors[subjects.EVENTS]),
        ]

    def tasks(self) -> list[BackgroundTask]:
        """Return the task that gives up scores that join no rollout."""
        return [self.unjoined.give_up_at_deadlines]

    async def _promote(self, first: int) -> None:
        """Make the promotion known that begins with `first`. Raises `DataError` where there is none."""
        found: Promotion | None = None
        if await self._is_stored(first):
            async for attempt in self.service.retrying("read the promotions"):
                with attempt:
                    found = await self.in_force.promotion_at(first)
        if found is None or found.first != first:
            raise DataError(f"scores are of a promotion from sequence {first} on, and there is none")
        async for attempt in self.service.retrying("load the promotions"):
            with attempt:
                known_terms = self._terms_of(await self.in_force.promotions_known_at(first))
        for known, terms in sorted(known_terms.items()):
            self.normalizer.promote(known, terms)
        log.info("%s: revision %s scores rollouts from sequence %d on", self.env, found.revision, first)

    async def _is_stored(self, seq: int) -> bool:
        """Whether ROLLOUTS goes so far. A server that lags behind has some seconds to catch up."""
        for _ in range(_MAX_POLLS):
            usage: StreamUsage = await self.service.retrying("read ROLLOUTS")(self.service.bus.usage, subjects.ROLLOUTS)
            if usage.last >= seq:
                return True
            await anyio.sleep(_POLL_S)
        return False

    def _terms_of(self, promotions: Sequence[Promotion]) -> dict[int, RewardTerms]:
        """Return how each promotion makes rewards. Raises `InfrastructureError` while one cannot be loaded: a message
        ends no service, and rewards wait for the configuration that goes with it."""
        found: dict[int, RewardTerms] = {}
        for one in promotions:
            if one.first is not None:
                try:
                    found[one.first] = _terms(self.settings.promoted(one)[self.env])
                except ConfigError as error:
                    raise InfrastructureError(
                        f"revision {one.revision} is promoted and cannot be loaded: {error}"
                    ) from error
        return found

    async def feed(self, message: StoredMessage) -> None:
        """Feed one input message to the normalizer."""
        if message.stream == subjects.EVENTS:
            self._events_read = message.seq
        if message.stream == subjects.ROLLOUTS:
            if message.seq <= self._members_read:
                return
            self._members_read = message.seq
            plan = Plan.unpack(message.headers.get(PLAN_HEADER))
            self.normalizer.member(message.seq, plan.group)
        elif message.subject.startswith("rl.dead."):
            letter = decode(DeadLetter, message.data)
            if letter.ends_rollout and letter.group is not None:
                self.normalizer.resolve(letter.group, letter.seq, None, source=message.seq)
        else:
            event = decode(ScoreEvent, message.data)
            if event.promoted is not None and not self.normalizer.is_known(event.promoted):
                await self._promote(event.promoted)
            for score in event.groups:
                await self._feed_score(score, message, event.promoted)
        self.unjoined.mark_read(message)

    async def reject(self, message: StoredMessage, error: DataError) -> None:
        """Make a dead letter of the message, and bound the wait for scores that it may have held."""
        await super().reject(message, error)
        if message.stream == subjects.EVENTS:
            await self.unjoined.hold(message)
        self.unjoined.mark_read(message)

    async def _feed_score(self, score: GroupScore, message: StoredMessage, promoted: int | None) -> None:
        try:
            rule = self.normalizer.rule_of(promoted)
            self.normalizer.resolve(score.group, score.seq, rule.columns(score), source=message.seq, promoted=promoted)
        except DataError as error:  # the group is dead, not the message: its letter comes back and closes its window
            letter = dead_letter(self.service, message, "data", error)
            letter = letter.replace(stream=subjects.ROLLOUTS, seq=score.seq, group=score.group)
            await store_dead_letter(self.service, letter)
        else:
            self._scores.setdefault((score.group, message.seq), (score, message.time_ns))

    def _forget(self, dropped: Iterable[tuple[str, int]]) -> None:
        for key in dropped:
            self._scores.pop(key, None)

    async def advance(self) -> None:
        """Read ROLLOUTS to its end where many scores are ahead: after that, those that are still name nothing."""
        if self.normalizer.ahead <= _MAX_AHEAD:
            return
        unread = replace(self.sources()[0], start=self._members_read + 1)
        await read_to_end(self.service, unread, self.feed_or_reject)
        self.unjoined.drop_ahead(self._events_read)

    async def commit(self) -> None:
        """Write new rewards and changes of state, if there are any."""
        self.unjoined.watch_ahead()
        while (step := self.normalizer.step()) is not None:
            await self._write(step)
            self.normalizer.forget_done()

    async def _write(self, step: NormalizerChange) -> None:
        start_ns = self.service.now_ns()
        needed = (self.normalizer.oldest_source(), self.unjoined.oldest_source(), self._events_read + 1)
        self.cursors = {
            subjects.ROLLOUTS: max(self.cursors[subjects.ROLLOUTS], self.normalizer.watermark),
            subjects.EVENTS: min(source for source in needed if source is not None),
        }
        rule = step.of.rule
        self._sources = [ready.source for ready in step.ready]
        await self.write(
            RewardEvent(
                run=self.service.run,
                env=self.env,
                revision=self.service.revision,
                advantage=rule.estimator.name,
                commit=self.next_commit(step.delta),
                groups=[self._reward(ready, rule, start_ns) for ready in step.ready],
                promoted=step.of.promoted,
            )
        )

    def state(self) -> bytes:
        """Return the normalizer's state."""
        return self.normalizer.state()

    def report(self, event: RewardEvent, receipt: CommitReceipt) -> None:
        """Trace the groups of a commit, and put the environment's statistics into the heartbeat."""
        self._trace(event.groups, receipt)
        folded = self.normalizer.watermark
        self._scores = {key: held for key, held in self._scores.items() if held[0].seq >= folded}
        self.service.vitals.emitted += len(event.groups)
        self.service.vitals.metrics.update(self.normalizer.metrics() | shaping_metrics(self.env, event.groups))
        shares = reliability_shares(self.normalizer.snapshot()).items()
        self.service.vitals.metrics.update({f"reliability/{self.env}/{name}": share for name, share in shares})

    def _trace(self, rewards: Sequence[GroupReward], receipt: CommitReceipt) -> None:
        """Export the spans of the sampled groups of a commit."""
        service, server = self.service, self.service.bus.server
        taken = subjects.event("score", service.run, service.revision, self.env)
        for reward, source in zip(rewards, self._sources, strict=True):
            if not service.tracing.sampled(reward.group):
                continue
            stamp = reward.stamps[-1]
            parent = process_id(reward.group, service.name, stamp.attempt)
            published = publish_span(
                service.name, reward.group, parent, self.subject, receipt.times,
                server=server, message=f"{subjects.EVENTS}:{receipt.seq}", size=receipt.size,
            )  # fmt: skip
            about = {"messaging.message.id": f"{subjects.EVENTS}:{source}"}
            service.tracing.emit([*stage_spans(reward.group, stamp, taken, about, server=server), published])

    def _reward(self, ready: ReadyGroup, rule: RewardRule, start_ns: int) -> GroupReward:
        score, stored_ns = self._scores.pop((ready.group, ready.source))
        stamp = Stamp(self.service.name, stored_ns, start_ns, self.service.now_ns())
        self.service.vitals.done(stamp, traced=ready.group if self.service.tracing.sampled(ready.group) else None)
        return rule.reward(ready, score, stamp)
