"""Learns from rewards about an environment's items: of a known pool, or those that clients name. Pure.

A learner connects a strategy with the log: it finds the item of a reward, and keeps the deltas since the last commit
and the whole state. Guarantees that state and deltas give the same learner again, to the bit.

Items that clients name have no pool: a new name takes the next free place of one, which doubles when it is full. One
free place always takes part in the draw. Its weight is what the strategy gives to an item that it knows nothing of.
"""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool
from lachesis.pipeline.environment.task_sampler import ItemWeights
from lachesis.pipeline.tasks.item_keys import exact_key, places_of
from lachesis.schemas.annotations import GroupReward
from lachesis.schemas.columns import as_bytes, view
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.item_names import is_item_name
from lachesis.schemas.values import convert_plain, unpack

__all__ = ["MAX_NAMED_ITEMS", "MAX_NAMES_BYTES", "NamedItemLearner", "PoolLearner", "feedback_of"]

MAX_NAMED_ITEMS = 1 << 16
"""Items that clients may name in one environment."""
MAX_NAMES_BYTES = 1 << 20
"""Of all names of one environment together, so that they fit into a message with their weights."""
_FIRST_PLACES = 64
"""Of the pool for named items, before it grows."""


class _PoolDelta(msgspec.Struct):
    """What was learned, and the keys of the items, by which another pool knows them."""

    keys: list[int]
    learned: list[ItemFeedback]


class _PoolState(msgspec.Struct):
    keys: bytes
    skills: list[str]
    strategy: dict[str, Any]


class _NamedDelta(msgspec.Struct, array_like=True):
    names: list[str]
    learned: list[ItemFeedback]


class _NamedState(msgspec.Struct, array_like=True):
    names: list[str]
    strategy: dict[str, Any]


def feedback_of(env: str, reward: GroupReward) -> ItemFeedback | None:
    """Return what a group teaches about its item, None when it names none of the pool."""
    if reward.index is None:
        return None
    judged = sum(score is not None for score in reward.scores)
    success = reward.success if judged else None
    return ItemFeedback(
        id=reward.group,
        env=env,
        item=reward.index,
        skill=reward.skill,
        n=judged,
        success=success,
        policy_step=reward.policy_step,
        status="scored" if success is not None else "unscorable",
        tokens=None if reward.tokens is None or not reward.scores else reward.tokens / len(reward.scores),
    )


class PoolLearner:
    """Learns about a pool that is known from the start."""

    without_item = (
        "are of no task of its pool (imported, or from a producer that draws its tasks itself); the curriculum learns "
        "nothing from them"
    )
    """Says of groups why `feedback_of` returns None."""

    def __init__(self, env: str, items: ItemPool, config: CurriculumConfig) -> None:
        self.env = env
        self.strategy = load_strategy(items, config)
        self.learned: list[ItemFeedback] = []
        """What follows the last commit."""
        self.moved = ""
        """Says how the pool differs from that of the state, if it does."""
        self._by_name: dict[int, int] | None = None

    def feedback_of(self, reward: GroupReward) -> ItemFeedback | None:
        """Return what a group teaches about its item, None when it is of no item of the pool.

        A group that was made before the pool was put in another order has its item's former place, and its name.
        """
        names = self.strategy.items.names
        if names is None or reward.index is None:
            return feedback_of(self.env, reward)
        name = exact_key(reward.item)
        if reward.index < len(names) and int(names[reward.index]) == name:
            return feedback_of(self.env, reward)
        if self._by_name is None:
            self._by_name = {int(one): place for place, one in enumerate(names)}
        return feedback_of(self.env, msgspec.structs.replace(reward, index=self._by_name.get(name)))

    def observe(self, feedback: ItemFeedback, name: str) -> None:
        """Take in what a group shows of the item of this name. Raises what `Strategy.observe` raises."""
        self.strategy.observe(feedback)
        self.learned.append(feedback)

    def take_delta(self) -> bytes:
        """Return what was learned since the last call."""
        keys = self.strategy.items.keys
        learned, self.learned = self.learned, []
        if keys is None:
            return msgspec.msgpack.encode(learned)
        return msgspec.msgpack.encode(_PoolDelta([int(keys[one.item]) for one in learned], learned))

    def apply_delta(self, delta: bytes) -> None:
        """Learn again what `take_delta` returned; what is not in the pool any more teaches nothing.

        Raises `SchemaError` where it is malformed.
        """
        found = unpack("curriculum delta", delta)
        keys = self.strategy.items.keys
        if keys is None:
            for feedback in convert_plain("curriculum delta", list[ItemFeedback], found):
                self.strategy.observe(feedback)
            return
        given = convert_plain("curriculum delta", _PoolDelta, found)
        if len(given.keys) != len(given.learned):
            raise SchemaError("curriculum delta: as many keys as feedback")
        for feedback, place in zip(given.learned, places_of(np.array(given.keys, np.uint64), keys), strict=True):
            if place >= 0:
                self.strategy.observe(replace(feedback, item=int(place)))

    def state(self) -> bytes:
        """Return all that was learned."""
        items = self.strategy.items
        if items.keys is None:
            return msgspec.msgpack.encode(self.strategy.state_dict())
        keys = as_bytes(items.keys.view(np.int64), "int64")
        return msgspec.msgpack.encode(_PoolState(keys, list(items.skills), self.strategy.state_dict()))

    def load_state(self, state: bytes) -> None:
        """Take over what `state` returned, of another pool what is known of the items that both have.

        Raises what `Strategy.load_state_dict` raises.
        """
        found = unpack("curriculum state", state)
        keys = self.strategy.items.keys
        if keys is None:
            self.strategy.load_state_dict(found)
            return
        saved = convert_plain("curriculum state", _PoolState, found)
        if len(saved.keys) % 8:
            raise SchemaError("curriculum state: keys of 8 bytes")
        former = view(saved.keys, "int64", len(saved.keys) // 8, "curriculum state, keys").view(np.uint64)
        if np.array_equal(former, keys) and list(self.strategy.items.skills) == saved.skills:
            self.strategy.load_state_dict(saved.strategy)
            return
        places = places_of(keys, former)
        self.strategy.load_moved(saved.strategy, places, saved.skills)
        both = int((places >= 0).sum())
        self.moved = (
            f"its tasks are not those of the last start, or in another order: {both} of {len(former)} are known again "
            f"by what they ask and keep what was learned of them, {len(keys) - both} are new"
        )

    def weights(self) -> ItemWeights:
        """Return the weights by which items are drawn."""
        return self.strategy.snapshot()

    def names(self) -> list[str] | None:
        """Return the items' names where clients know them by these alone; there is one weight more than names."""
        return None


class NamedItemLearner(PoolLearner):
    """Learns about items by the names that clients give them, as many as there is room for."""

    without_item = (
        "name no item in group_overrides.curriculum_item, or one for which there is no room "
        f"({MAX_NAMED_ITEMS} items, {MAX_NAMES_BYTES} bytes of names); they are trained on, and the curriculum learns "
        "nothing from them"
    )

    def __init__(self, env: str, config: CurriculumConfig) -> None:
        super().__init__(env, _pool(0), config)
        self._places: dict[str, int] = {}  # in the order in which they came
        self._names_bytes = 0
        self._committed = 0

    def feedback_of(self, reward: GroupReward) -> ItemFeedback | None:
        """Return what a group teaches about its item, None when it names none, or one without room."""
        place = self._places.get(reward.item)
        if place is None and is_item_name(reward.item) and self._has_room(reward.item):
            place = len(self._places)
        return feedback_of(self.env, msgspec.structs.replace(reward, index=place))

    def observe(self, feedback: ItemFeedback, name: str) -> None:
        """Take in what a group shows of the item of this name, which may be new."""
        super().observe(feedback, name)
        if feedback.item == len(self._places):
            self._add(name)

    def take_delta(self) -> bytes:
        """Return the new names and what was learned since the last call."""
        new = list(self._places)[self._committed :]
        self._committed = len(self._places)
        delta = msgspec.msgpack.encode(_NamedDelta(new, self.learned))
        self.learned = []
        return delta

    def apply_delta(self, delta: bytes) -> None:
        """Learn again what `take_delta` returned. Raises `SchemaError` where it is malformed."""
        made = convert_plain("curriculum delta", _NamedDelta, unpack("curriculum delta", delta))
        names = iter(made.names)
        for feedback in made.learned:
            name = next(names, None) if feedback.item == len(self._places) else None
            if name is None and feedback.item >= len(self._places):
                raise SchemaError(f"curriculum delta: item {feedback.item} has no name")
            self.strategy.observe(feedback)
            if name is not None:
                self._add(name)
        self._committed = len(self._places)

    def state(self) -> bytes:
        """Return all that was learned, and the names."""
        return msgspec.msgpack.encode(_NamedState(list(self._places), self.strategy.state_dict()))

    def load_state(self, state: bytes) -> None:
        """Take over what `state` returned. Raises what `Strategy.load_state_dict` raises."""
        saved = convert_plain("curriculum state", _NamedState, unpack("curriculum state", state))
        strategy = load_strategy(_pool(len(saved.names)), self.strategy.config)
        strategy.load_state_dict(saved.strategy)
        self.strategy = strategy
        self._places = {name: place for place, name in enumerate(saved.names)}
        self._names_bytes = sum(len(name.encode()) for name in saved.names)
        self._committed = len(saved.names)

    def weights(self) -> ItemWeights:
        """Return the weights of the named items, and of an item without a name that is known; their mean is 1."""
        shown = len(self._places) + 1
        weights = self.strategy.snapshot().weights[:shown]
        return ItemWeights.of(weights * np.float32(shown / weights.sum(dtype=np.float64)), self.strategy.observations)

    def names(self) -> list[str] | None:
        """Return the names in the order of their weights."""
        return list(self._places)

    def _has_room(self, name: str) -> bool:
        return len(self._places) < MAX_NAMED_ITEMS and self._names_bytes + len(name.encode()) <= MAX_NAMES_BYTES

    def _add(self, name: str) -> None:
        self._places[name] = len(self._places)
        self._names_bytes += len(name.encode())
        if len(self._places) == self.strategy.items.count:
            self.strategy = self.strategy.grown(_pool(len(self._places)))
        else:
            self.strategy.items = _pool(len(self._places))


def _pool(names: int) -> ItemPool:
    """Return a pool for so many named items, one that stands for any other, and places that are not drawn yet."""
    places = _FIRST_PLACES
    while places <= names:
        places *= 2
    return ItemPool(places, held_out=np.arange(names + 1, places, dtype=np.int64))
