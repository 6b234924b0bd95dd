"""The stages' state against one uninterrupted pass over the recorded inputs, bit for bit.

A stage that was killed a hundred times has committed some state and some position. What a restart would make of both,
fed the rest of the input, must be what the pure logic makes of all of it in one pass; and what was put out on the way
must be what the pass puts out. Each check returns the violations.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
from chaos.history import History

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.curriculum.logic.learner import PoolLearner
from lachesis.pipeline.curriculum.stage import items_of
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.normalizer.logic.normalizer import ReadyGroup
from lachesis.pipeline.normalizer.logic.revision_normalizers import RevisionNormalizers, RewardTerms
from lachesis.pipeline.normalizer.logic.reward import RewardRule
from lachesis.pipeline.promotion.record import read_promotions
from lachesis.pipeline.runtime.commitlog import CommitLog, RestoredState
from lachesis.schemas import subjects
from lachesis.schemas.annotations import (
    Commit,
    CurriculumEvent,
    DeadLetter,
    GroupReward,
    GroupScore,
    RewardEvent,
    ScoreEvent,
)
from lachesis.schemas.errors import DataError, LachesisError
from lachesis.services.promotion import config_under_promotion
from lachesis.services.stage_settings import reward_settings

__all__ = ["curriculum", "normalizer"]

E = TypeVar("E", RewardEvent, CurriculumEvent)


async def normalizer(bus: Bus, history: History, config: RunConfig, env: str) -> list[str]:
    """The normalizer of one environment: its state, and every reward it ever committed."""
    try:
        restored = await _restored(
            bus,
            RewardEvent,
            lambda event: event.commit,
            stage="normalizer",
            subject=subjects.event("reward", history.run, subjects.LIVE, env),
            state_subject=subjects.state(history.run, "normalizer", subjects.LIVE, env),
        )
    except LachesisError as error:
        return [str(error)]
    listed, _ = await read_promotions(bus, history.run, subjects.LIVE)
    own, *promoted = (
        RewardTerms(one.normalization_of(env), reward_settings(one)[env].rule())
        for one in (config, *(config_under_promotion(promotion, config) for promotion in listed if promotion.first))
    )
    known = dict(zip((promotion.first for promotion in listed if promotion.first), promoted, strict=True))
    whole, goes_on = RevisionNormalizers(env, own), RevisionNormalizers(env, own)
    whole.restore(None, [], known)
    state = msgspec.msgpack.decode(restored.state) if restored.state is not None else None
    goes_on.restore(state, [msgspec.msgpack.decode(delta) for delta in restored.deltas], known)
    rules = {None: own.rule, **{first: terms.rule for first, terms in known.items()}}
    ready = _fold(whole, history, env, {}, rules)
    _fold(goes_on, history, env, restored.cursors, rules)
    found = []
    if whole.state() != goes_on.state():
        found.append(f"{env}: the committed state and the rest of the input give {_difference(whole, goes_on)}")
    return found + _rewards(ready, history, rules, env)


def _fold(
    state: RevisionNormalizers,
    history: History,
    env: str,
    cursors: dict[str, int],
    rules: Mapping[int | None, RewardRule],
) -> list[ReadyGroup]:
    """Feed everything from the cursors on and return what became ready, as the stage would."""
    for rollout in history.rollouts:
        if rollout.env == env and rollout.plan and rollout.seq >= cursors.get(subjects.ROLLOUTS, 1):
            state.member(rollout.seq, rollout.plan.group)
    for seq, event in history.annotations:
        if seq < cursors.get(subjects.EVENTS, 1):
            continue
        match event:
            case ScoreEvent(env=of) if of == env:
                for score in event.groups:
                    try:
                        columns = rules[event.promoted].columns(score)
                        state.resolve(score.group, score.seq, columns, source=seq, promoted=event.promoted)
                    except DataError:
                        continue  # dead; its letter follows
            case DeadLetter(env=of, group=str(group)) if of == env and event.ends_rollout:
                state.resolve(group, event.seq, None, source=seq)
    ready = []
    while (step := state.step()) is not None:
        ready += step.ready
    return ready


def _difference(one: RevisionNormalizers, other: RevisionNormalizers) -> str:
    left, right = (msgspec.msgpack.decode(state.state()) for state in (one, other))
    return ", ".join(f"{key} {right[key]!r:.200} where one pass gives {left[key]!r:.200}"
                     for key in left if left[key] != right[key])  # fmt: skip


def _rewards(
    ready: Sequence[ReadyGroup], history: History, rules: Mapping[int | None, RewardRule], env: str
) -> list[str]:
    scores: dict[tuple[str, int], GroupScore] = {}
    rewards: list[tuple[GroupReward, int | None]] = []
    for seq, event in history.annotations:
        match event:
            case ScoreEvent(env=of) if of == env:
                for score in event.groups:
                    scores.setdefault((score.group, seq), score)
            case RewardEvent(env=of) if of == env:
                rewards += [(reward, event.promoted) for reward in event.groups]
    expected = {item.group: item for item in ready}
    found = []
    seen: set[str] = set()
    for reward, promoted in rewards:
        item = expected.get(reward.group)
        if reward.group in seen:
            found.append(f"{env}: group {reward.group} was rewarded twice")
        elif item is None:
            found.append(f"{env}: group {reward.group} was rewarded, where one pass has nothing ready")
        else:
            once = rules[promoted].reward(item, scores[item.group, item.source])
            if msgspec.structs.replace(reward, stamps=[]) != msgspec.structs.replace(once, stamps=[]):
                found.append(f"{env}: group {reward.group} was rewarded {reward}, one pass gives {once}")
        seen.add(reward.group)
    return found


async def curriculum(bus: Bus, history: History, config: RunConfig, env: str) -> list[str]:
    """The curriculum of one environment."""
    try:
        restored = await _restored(
            bus,
            CurriculumEvent,
            lambda event: event.commit,
            stage="curriculum",
            subject=subjects.event("curriculum", history.run, subjects.LIVE, env),
            state_subject=subjects.state(history.run, "curriculum", subjects.LIVE, env),
        )
    except LachesisError as error:
        return [str(error)]
    settings = config.environments[env]
    items = items_of(load_environment(settings.kind, settings.params))
    whole, goes_on = PoolLearner(env, items, config.curriculum), PoolLearner(env, items, config.curriculum)
    if restored.state is not None:
        goes_on.load_state(restored.state)
    for delta in restored.deltas:
        goes_on.apply_delta(delta)
    _learn(whole, history, env, 1)
    _learn(goes_on, history, env, restored.cursors.get(subjects.EVENTS, 1))
    if whole.state() == goes_on.state():
        return []
    left, right = whole.strategy.metrics(), goes_on.strategy.metrics()
    return [f"{env}: the committed state and the rest of the input give {right}, one pass gives {left}"]


def _learn(learner: PoolLearner, history: History, env: str, start: int) -> None:
    for seq, event in history.annotations:
        if isinstance(event, RewardEvent) and event.env == env and seq >= start:
            for reward in event.groups:
                feedback = learner.feedback_of(reward)
                if feedback is not None:
                    learner.observe(feedback, reward.item)


async def _restored(
    bus: Bus, kind: type[E], commit_of: Callable[[E], Commit], *, stage: str, subject: str, state_subject: str
) -> RestoredState:
    """Return what a restart of the stage would find. Raises what it would raise."""
    opened = await CommitLog.open(
        bus, kind, commit_of, subject=subject, state_subject=state_subject, stage=stage, term="audit"
    )
    return opened[1]
