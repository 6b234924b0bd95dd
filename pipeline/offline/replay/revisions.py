"""Reads whole revisions, live or replayed, and the text of single samples.

Guarantees that of several annotations of one group the first stored counts, as it does everywhere.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.bus.newer_writers import confirm_newer
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.offline.compare.logic import ComparedGroup, ComparedRevision, ScoreSource
from lachesis.pipeline.promotion.record import read_promotions
from lachesis.pipeline.runtime.rollouts import read_rollout
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, GroupReward, GroupScore, RewardEvent, ScoreEvent
from lachesis.schemas.codec import Event, decode
from lachesis.schemas.errors import DataError, SchemaError, VersionError
from lachesis.schemas.replay import EnsembleInfo, RescoreEvent, RevisionRecord
from lachesis.schemas.rollout import Message
from lachesis.schemas.subjects import EVENTS, REPLAY, ROLLOUTS

__all__ = [
    "DerivedScores",
    "conversation",
    "definition",
    "ensembles_of",
    "events_of",
    "following",
    "overridden_normalizations",
    "read_derived",
    "read_revision",
    "revision_names",
]

E = TypeVar("E", bound=Event)


class _RevisionRead:
    def __init__(self) -> None:
        self.scores: dict[str, tuple[str, GroupScore, ScoreSource]] = {}
        self.rewards: dict[str, GroupReward] = {}
        self.unscored: set[int] = set()

    def add_event(self, event: "DerivedScores") -> None:
        made_by = ScoreSource(event.ensemble or "", tuple(sorted((event.raters or {}).items())), event.promoted)
        for score in event.scores:
            self.scores.setdefault(score.group, (event.env, score, made_by))
        for reward in event.rewards:
            self.rewards.setdefault(reward.group, reward)

    def revision(self, name: str, *, complete: bool, promotions: Mapping[int, str]) -> ComparedRevision:
        groups = {
            group: ComparedGroup(env, score, self.rewards.get(group), made_by)
            for group, (env, score, made_by) in self.scores.items()
        }
        return ComparedRevision(name, groups, len(self.unscored), complete, promotions)


class DerivedScores(NamedTuple):
    """What one event says of some groups of `env`, and what made it. `unscored`: sequence, group and why, of what has
    no score. `reached`: of a replay, the sequence of ROLLOUTS below which all of `env` is in the revision. `promoted`:
    the first sequence of the promotion by which it was made."""

    env: str
    scores: list[GroupScore] = []
    rewards: list[GroupReward] = []
    unscored: list[tuple[int, str | None, str]] = []
    ensemble: str | None = None
    raters: dict[str, str] | None = None
    estimator: str | None = None
    reached: int = 0
    promoted: int | None = None


async def read_revision(bus: Bus, config: RunConfig, name: str, max_groups: int | None = None) -> ComparedRevision:
    """Return a revision of the run: `live` (or the live revision's name) or one that a replay wrote.

    Raises `NotFoundError` where there is no such revision, naming those there are, or nothing in it; `DataError` where
    it has more than `max_groups`.
    """
    defined = await definition(bus, config, name)
    gathered = _RevisionRead()
    reached = dict.fromkeys(defined.selection.envs, 0) if defined is not None else {}
    async with aclosing(read_derived(bus, config, defined)) as events:
        async for event in events:
            gathered.add_event(event)
            if max_groups is not None and len(gathered.scores) > max_groups:
                raise DataError(f"revision {name!r} has more than {max_groups} groups: use `lachesis compare`")
            gathered.unscored |= {seq for seq, _, _ in event.unscored}
            reached[event.env] = event.reached
    complete = defined is None or (defined.last is not None and min(reached.values()) > defined.last)
    promoted = (await read_promotions(bus, config.run, config.revision))[0] if defined is None else []
    names = {one.first: one.revision for one in promoted if one.first is not None}
    shown = name if defined is not None else config.revision
    found = gathered.revision(shown, complete=complete, promotions=names)
    if not found.groups:
        raise NotFoundError(f"revision {name!r} of run {config.run} has no scores yet")
    return found


async def definition(bus: Bus, config: RunConfig, name: str) -> RevisionRecord | None:
    """Return what a replayed revision is, None if `name` is the live one.

    Raises `NotFoundError` naming all.
    """
    if name in {subjects.LIVE, config.revision}:
        return None
    run = config.run
    subjects.check_name("revision", name)
    defined, _, _ = await read_last_event(
        bus, REPLAY, subjects.revision(run, name), RevisionRecord, lambda one: one.run == run
    )
    if defined is None:
        known = ", ".join(await revision_names(bus, run))
        raise NotFoundError(f"run {run} has no revision {name!r}; there are {known}")
    return defined


async def read_derived(bus: Bus, config: RunConfig, defined: RevisionRecord | None) -> AsyncGenerator[DerivedScores]:
    """Yield everything derived from the run's groups under a revision, as it was stored.

    `defined` None: the live revision. Several events may concern one group: the first counts. The generator holds a
    reader open: a caller that may stop early closes it.
    """
    run, revision = config.run, config.revision
    if defined is not None:
        subject = subjects.replay("rescore", run, defined.revision)
        async with events_of(bus, REPLAY, subject, RescoreEvent) as events:
            async for event in events:
                unscored: list[tuple[int, str | None, str]] = [
                    (one.seq, one.group, one.reason) for one in event.unscored
                ]
                made_by = event.ensemble, event.raters, event.advantage
                yield DerivedScores(
                    event.env, event.scores, event.rewards, unscored, *made_by, event.commit.cursors.get(ROLLOUTS, 0)
                )
        return
    async with events_of(bus, EVENTS, subjects.event("score", run, revision), ScoreEvent) as scores:
        async for score in scores:
            yield DerivedScores(
                score.env, scores=score.groups, ensemble=score.ensemble, raters=score.raters, promoted=score.promoted
            )
    async with events_of(bus, EVENTS, subjects.event("reward", run, revision), RewardEvent) as rewards:
        async for reward in rewards:
            yield DerivedScores(reward.env, rewards=reward.groups, estimator=reward.advantage)
    async with events_of(bus, EVENTS, subjects.event("dead", run, revision), DeadLetter) as letters:
        async for letter in letters:
            if letter.ends_rollout:
                yield DerivedScores(letter.env, unscored=[(letter.seq, letter.group, letter.reason)])


async def revision_names(bus: Bus, run: str) -> list[str]:
    """Return the names of the revisions that the run has: `live` first, then those of replays."""
    async with events_of(bus, REPLAY, subjects.revision(run), RevisionRecord) as records:
        return [subjects.LIVE, *sorted({record.revision async for record in records})]


async def following(bus: Bus, run: str) -> list[tuple[RevisionRecord, int]]:
    """Return the definition and next sequence of each revision that follows the run, or did."""
    records: dict[str, RevisionRecord] = {}
    async with events_of(bus, REPLAY, subjects.revision(run), RevisionRecord) as found:
        async for one in found:
            if one.run == run and one.selection.follow:
                records.setdefault(one.revision, one)
    return [(one, await _reached(bus, one)) for _, one in sorted(records.items())]


async def _reached(bus: Bus, defined: RevisionRecord) -> int:
    reached = defined.first
    for env in defined.selection.envs:
        last, _, _ = await read_last_event(
            bus,
            REPLAY,
            subjects.replay("rescore", defined.run, defined.revision, env),
            RescoreEvent,
            lambda event: event.revision == defined.revision,
        )
        reached = max(reached, last.commit.cursors.get(ROLLOUTS, 0) if last else 0)
    return reached


def overridden_normalizations(config: RunConfig, envs: Iterable[str]) -> dict[str, Any]:
    """Return the settings of those environments that are normalized otherwise than the run."""
    found = {env: config.environments[env].normalization for env in envs}
    return {env: msgspec.to_builtins(own) for env, own in found.items() if own is not None}


def ensembles_of(config: RunConfig, scorers: Mapping[str, EnvironmentScorer]) -> dict[str, EnsembleInfo]:
    """Return the ensemble that scores each environment; `scorers`: those of `config`."""
    found = {}
    for env, scorer in scorers.items():
        settings = config.environments[env]
        found[env] = EnsembleInfo(
            ensemble=scorer.digest,
            raters=scorer.versions,
            success_rater=settings.success_rater,
            success_threshold=settings.success_threshold,
        )
    return found


@asynccontextmanager
async def events_of(bus: Bus, stream: str, subject: str, kind: type[E]) -> AsyncIterator[AsyncIterator[E]]:
    """Yield the events of a kind.

    A message that holds none is passed over: its consumer has made a dead letter of it.
    """

    async def decoded() -> AsyncIterator[E]:
        async for message in messages:
            try:
                event = decode(kind, message.data)
            except SchemaError as error:
                if isinstance(error, VersionError):
                    await confirm_newer(bus, message, error)
                continue
            yield event

    async with bus.read(stream, [subject], follow=False) as messages:
        yield decoded()


async def conversation(bus: Bus, seq: int, sample: int) -> list[Message] | None:
    """Return the conversation of a sample of the rollout at `seq`; None if it cannot be read."""
    try:
        said = read_rollout(await bus.get(ROLLOUTS, seq)).group.messages
    except (NotFoundError, DataError):
        return None
    return said[sample] if sample < len(said) else None
