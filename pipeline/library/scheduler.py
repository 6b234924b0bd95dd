"""Draws the items of a loop of your own by a curriculum, and learns from the results. Pure."""

from collections.abc import Hashable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from lachesis.pipeline.common.number_arguments import listed, number_column, table_of, whole_number
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool
from lachesis.pipeline.errors import SettingsChangedError
from lachesis.pipeline.tasks.item_keys import exact_key
from lachesis.schemas.errors import ConfigError, DataError

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

        Raises `ConfigError` where an item has no name of its own, or columns are not as long as the items.
        """
        self.items = _names("items", items)
        self._place = {name: place for place, name in enumerate(self.items)}
        if len(self._place) < len(self.items):
            raise ConfigError("items: each needs a name of its own")
        columns = {
            "difficulty": None if difficulty is None else _difficulties(difficulty),
            "skills": None if skills is None else _names("skills", skills),
        }
        for name, column in columns.items():
            if column is not None and len(column) != len(self.items):
                raise ConfigError(f"{name}: {len(column)} for {len(self.items)} items")
        self._items_key = exact_key("\0".join(map(str, self.items)))
        known = columns["skills"]
        names = sorted(set(known), key=str) if known else [""]
        place = {name: number for number, name in enumerate(names)}
        pool = ItemPool(
            len(self.items),
            difficulty=None if difficulty is None else np.array(columns["difficulty"], np.float64),
            skill=None if known is None else np.array([place[one] for one in known], np.int32),
            skills=names,
        )
        try:
            config = CurriculumConfig(strategy=strategy, **settings)
        except TypeError as error:
            raise ConfigError(f"a curriculum: {error}") from error
        self._strategy = load_strategy(pool, config)
        try:
            self._rng = np.random.default_rng(whole_number("seed", seed))
        except DataError as error:
            raise ConfigError(str(error)) from error
        self._observed = 0

    def sample(self, n: int = 1) -> list[str]:
        """Draw n items by the weights of the moment."""
        return [self.items[drawn.item] for drawn in self._strategy.sample(n, self._rng)]

    def update(
        self, item: str, successes: Sequence[float | bool | None], *, step: int = 0, tokens: float | None = None
    ) -> bool:
        """Learn from one group of answers to an item; return whether anything was learned.

        `successes` lie in [0, 1]; None is an answer that could not be scored, and teaches nothing. `step` is the
        optimizer step of the policy that answered. `tokens`: how many it generated for an answer, on average; the
        strategy `gain_per_token` needs it. Raises `DataError` on an unknown item or other successes.
        """
        if not isinstance(item, Hashable) or item not in self._place:
            raise DataError(f"item {item!r:.60} is not one of the {len(self.items)} items")
        known = [one for one in number_column("success", successes) if one is not None]
        for one in known:
            if not 0 <= one <= 1:
                raise DataError(f"a success is {one:g}; give numbers from 0 to 1")
        step = whole_number("step", step)
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
                tokens=tokens,
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

        Raises `SettingsChangedError` if it was learned of other items, or of these in another order, and `DataError`
        on anything that `state_dict` did not return; then nothing has changed.

        Raises what `Strategy.load_state_dict` raises.
        """
        state = table_of("state of a curriculum", state)
        if state.get("items", self._items_key) != self._items_key:
            raise SettingsChangedError(
                f"the curriculum learned of other items than these {len(self.items)}, or of these in another order: "
                "give the items as they were, or begin again"
            )
        rng = np.random.default_rng()
        try:
            saved = state["rng"]
            rng.bit_generator.state = {**saved, "state": {k: int(v) for k, v in saved["state"].items()}}
            observed, learned = whole_number("observed", state["observed"]), state["strategy"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"state of a curriculum: {error!r:.200}; give what `state_dict` returned") from error
        self._strategy.load_state_dict(learned)
        self._rng, self._observed = rng, observed


def _names(what: str, values: Any) -> list[Any]:
    """Return the names, those of NumPy and torch as Python's. Raises `ConfigError` unless each is text or whole."""
    try:
        names = [one.item() if getattr(one, "shape", None) == () else one for one in listed(what, values)]
    except DataError as error:
        raise ConfigError(str(error)) from error
    for place, name in enumerate(names):
        if not isinstance(name, str | Integral):
            raise ConfigError(f"{what}: number {place} is {name!r:.80}; give names, texts or whole numbers")
    return names


def _difficulties(values: Any) -> list[float | None]:
    try:
        return number_column("difficulty", values)
    except DataError as error:
        raise ConfigError(str(error)) from error
