"""Draws the items of a loop of your own by a curriculum, and learns from the results. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool
from lachesis.pipeline.tasks.item_keys import exact_key
from lachesis.schemas.errors import ConfigError, DataError, SettingsChangedError

__all__ = ["CurriculumScheduler"]


class CurriculumScheduler:
    """A curriculum over items that are known by name: `irt` by default, or any other strategy of `CurriculumConfig`."""

    def __init__(
        self,
        items: Sequence[str],
        *,
        strategy: str = "irt",
        difficulty: Sequence[float] | None = None,
        skills: Sequence[str] | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Begin with the known figures of the items. `settings`: the others of `CurriculumConfig`.

        Raises `ConfigError` where names repeat, or columns are not as long as the items.
        """
        self.items = list(items)
        self._place = {name: place for place, name in enumerate(self.items)}
        if len(self._place) < len(self.items):
            raise ConfigError("items: each needs a name of its own")
        for name, column in (("difficulty", difficulty), ("skills", skills)):
            if column is not None and len(column) != len(self.items):
                raise ConfigError(f"{name}: {len(column)} for {len(self.items)} items")
        self._items_key = exact_key("\0".join(map(str, self.items)))
        names = sorted(set(skills)) if skills is not None else [""]
        pool = ItemPool(
            len(self.items),
            difficulty=None if difficulty is None else np.array(difficulty, np.float64),
            skill=None if skills is None else np.array([names.index(one) for one in skills], np.int32),
            skills=names,
        )
        try:
            config = CurriculumConfig(strategy=strategy, **settings)
        except TypeError as error:
            raise ConfigError(f"a curriculum: {error}") from error
        self._strategy = load_strategy(pool, config)
        self._rng = np.random.default_rng(seed)
        self._observed = 0

    def sample(self, n: int = 1) -> list[str]:
        """Draw n items by the weights of the moment."""
        return [self.items[drawn.item] for drawn in self._strategy.sample(n, self._rng)]

    def update(self, item: str, successes: Sequence[float | bool | None], *, step: int = 0) -> bool:
        """Learn from one group of answers to an item; say whether it taught something.

        `successes` lie in [0, 1]; None is an answer that could not be scored, and teaches nothing. `step` is the
        optimizer step of the policy that answered. Raises `DataError` on an unknown item or other successes.
        """
        if item not in self._place:
            raise DataError(f"item {item!r:.60} is not one of the {len(self.items)} items")
        known = [float(one) for one in successes if one is not None]
        self._observed += 1
        return self._strategy.observe(
            ItemFeedback(
                id=f"{self._observed}",
                env="",
                item=self._place[item],
                skill=None,
                n=len(known),
                success=sum(known) / len(known) if known else None,
                policy_step=step,
                status="scored" if known else "unscorable",
            )
        )

    def weights(self) -> dict[str, float]:
        """Return the weight of each item; their mean is 1."""
        return dict(zip(self.items, self._strategy.snapshot().weights.tolist(), strict=True))

    def metrics(self) -> dict[str, float]:
        """Return figures for monitoring, under `curriculum/`."""
        return self._strategy.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return all that was learned, as msgpack or JSON with bytes can hold it."""
        return {
            "items": self._items_key,
            "strategy": self._strategy.state_dict(),
            "observed": self._observed,
            "rng": {
                **self._rng.bit_generator.state,
                "state": {k: str(v) for k, v in self._rng.bit_generator.state["state"].items()},
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned: the same draws follow.

        Raises `SettingsChangedError` if it was learned of other items, or of these in another order.

        Raises what `Strategy.load_state_dict` raises.
        """
        if state.get("items", self._items_key) != self._items_key:
            raise SettingsChangedError(
                f"the curriculum learned of other items than these {len(self.items)}, or of these in another order: "
                "give the items as they were, or begin anew"
            )
        self._strategy.load_state_dict(state["strategy"])
        self._observed = state["observed"]
        rng = state["rng"]
        self._rng.bit_generator.state = {**rng, "state": {k: int(v) for k, v in rng["state"].items()}}
