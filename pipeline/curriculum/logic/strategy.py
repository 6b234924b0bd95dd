"""Defines the base class of curriculum strategies, which turn feedback into weights.

A strategy takes `ItemFeedback` on every finished group, dropped ones too, in any order, repeated or late. It returns
one weight per item. `sample` draws by these weights here; environments elsewhere draw by a published `ItemWeights`.
Repeats and infrastructure failures change nothing; late feedback counts less, and feedback that is too old does not
count. Deterministic: equal feedback in equal order gives equal weights, and equal draws from an equal generator.

A strategy of your own subclasses `Strategy` and overrides `weights` and `learn`, and `arrays` if it keeps state.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Annotated, Any, Literal, Self, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from lachesis.pipeline.common.number_arguments import check_kind, plain_numbers
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.known_strategies import name_of
from lachesis.pipeline.environment.task_sampler import DrawnItem, ItemWeights, TaskSampler
from lachesis.pipeline.errors import SettingsChangedError
from lachesis.pipeline.tasks.held_out import mask_held_out
from lachesis.schemas.columns import DType, view
from lachesis.schemas.errors import ConfigError, DataError, SchemaError
from lachesis.schemas.values import Count, convert_plain

__all__ = ["FeedbackStatus", "ItemFeedback", "ItemPool", "Strategy"]

FeedbackStatus = Literal["scored", "unscorable", "infrastructure"]
_NEW_RUN = "start a new run, and set its `model` to a checkpoint of this one if you like"
STATE_VERSION = 2
_Number = Annotated[int, Meta(ge=0, le=1 << 53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFeedback:
    """The outcome of one group: `id` names it, `item` is its index, `success` the mean over `n` samples, in [0, 1].

    `policy_step` is the version it was generated under. Status "scored" teaches, whether or not the group is trained
    on; "unscorable" and "infrastructure" say nothing about the item, and `success` is then None.
    """

    id: str
    env: str
    item: int
    skill: str | None
    n: int
    success: float | None
    policy_step: int
    status: FeedbackStatus = "scored"
    tokens: float | None = None
    """Generated tokens of a sample, their mean; None: not known."""


@dataclass(frozen=True, slots=True)
class ItemPool:
    """The items of one environment: `difficulty` float [N] if a prior is known (any scale, higher is harder), and
    `skill` int [N], an index into `skills`. Default: one skill. `held_out` int [n] are those that are evaluated and
    never drawn: they have no weight, whatever the strategy. `features` float32 [N, F]: numbers by which items whose
    difficulty is not known may be compared (`logic/features.py`).
    """

    count: int
    difficulty: NDArray[np.float64] | None = None
    skill: NDArray[np.int32] | None = None
    skills: Sequence[str] = ("",)
    held_out: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    features: NDArray[np.float32] | None = None
    keys: NDArray[np.uint64] | None = None
    """What each item is known by in another order of the pool, and another start of the run."""
    names: NDArray[np.uint64] | None = None
    """The key of each item's name, as groups bear it."""
    contents: NDArray[np.uint64] | None = None
    """The same number for items that are the same task under several names; None: there are none such."""

    def __post_init__(self) -> None:
        check_kind("the number of items", self.count, Integral)
        if self.count < 1:
            raise ConfigError(f"an environment needs items to draw from, has {self.count}.")
        for name in ("difficulty", "skill"):
            column = getattr(self, name)
            if column is not None and not _is_finite_column(column, self.count):
                raise ConfigError(f"items.{name}: needs {self.count} finite numbers.")
        if self.features is not None and not (
            self.features.ndim == 2 and len(self.features) == self.count and np.isfinite(self.features).all()
        ):
            raise ConfigError(f"items.features: needs {self.count} rows of finite numbers.")
        if self.skill is not None and (self.skill.min() < 0 or self.skill.max() >= len(self.skills)):
            raise ConfigError(f"items.skill: indices must lie within the {len(self.skills)} skills.")

    @property
    def skill_index(self) -> NDArray[np.int32]:
        """int32 [N], zeros if there is one skill."""
        return np.zeros(self.count, np.int32) if self.skill is None else self.skill

    def ranks(self) -> NDArray[np.int64]:
        """int64 [N]: place of each item from easiest (0) to hardest, ties and unknown difficulty by index."""
        ranks = np.empty(self.count, np.int64)
        order = np.arange(self.count) if self.difficulty is None else np.argsort(self.difficulty, kind="stable")
        ranks[order] = np.arange(self.count)
        return ranks


def _is_finite_column(column: object, rows: int) -> bool:
    return (
        isinstance(column, np.ndarray)
        and column.dtype.kind in "iuf"
        and column.shape == (rows,)
        and bool(np.isfinite(column).all())
    )


@dataclass(slots=True)
class _Counts:
    observed: int = 0
    repeated: int = 0
    too_old: int = 0
    uninformative: int = 0


class _SavedStrategy(msgspec.Struct):
    version: int
    strategy: str
    items: int
    step: Count
    counts: tuple[_Number, _Number, _Number, _Number]
    ids: list[str]
    arrays: dict[str, bytes]


class Strategy:
    """Base class; weights are those of a uniform draw."""

    def __init__(self, items: ItemPool, config: CurriculumConfig) -> None:
        self.items = items
        self.config = config
        self.step = 0
        """Newest policy step seen in any feedback."""
        self._counts = _Counts()
        self._ids: dict[str, None] = {}  # of feedback seen, oldest first
        self._sampler: TaskSampler | None = None  # by the current weights

    # -- to override

    def weights(self) -> NDArray[np.float64]:
        """Return weights float64 [N], at least 0, some above 0; any scale. O(N)."""
        return np.ones(self.items.count)

    def learn(self, feedback: ItemFeedback, success: float, discount: float) -> None:
        """Take in one informative result; scale the step by `discount`, in (0, 1]."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that are this strategy's state, by name; they are saved, and restored in place."""
        return {}

    def completed(self, saved: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the arrays of a saved state, with those that it had no use for as its pool was then."""
        return dict(saved)

    def invalid_array(self, arrays: Mapping[str, NDArray[Any]]) -> str | None:
        """Return the name of a saved array with values that this strategy never has, None if there is none."""
        return next((name for name, array in arrays.items() if not np.isfinite(array).all()), None)

    def figures(self) -> dict[str, float]:
        """Return figures of this strategy for monitoring."""
        return {}

    # -- the interface

    @property
    def observations(self) -> int:
        """Results that the strategy learned from."""
        return self._counts.observed

    def observe(self, feedback: ItemFeedback) -> bool:
        """Take in the outcome of a group; return whether anything was learned from it.

        Raises DataError (state untouched) on an item that does not exist, or a success outside [0, 1] or of no samples.
        """
        check_kind("feedback", feedback, ItemFeedback)
        for name in ("item", "n", "policy_step"):
            check_kind(f"feedback {feedback.id!s:.40}: {name}", getattr(feedback, name), Integral)
        if feedback.success is not None:
            plain_numbers(f"feedback {feedback.id!s:.40}: success", [feedback.success])
        if not 0 <= feedback.item < self.items.count:
            raise DataError(f"feedback {feedback.id}: item {feedback.item} is not one of {self.items.count}.")
        if feedback.success is not None and not 0 <= feedback.success <= 1:
            raise DataError(f"feedback {feedback.id}: success {feedback.success} lies outside [0, 1].")
        if feedback.tokens is not None:
            plain_numbers(f"feedback {feedback.id!s:.40}: tokens", [feedback.tokens])
            if not 0 <= feedback.tokens < math.inf:
                raise DataError(f"feedback {feedback.id}: {feedback.tokens} tokens a sample; give 0 or more.")
        if feedback.success is not None and feedback.n < 1:
            raise DataError(f"feedback {feedback.id}: a success of {feedback.n} samples; needs at least 1.")
        if feedback.id in self._ids:
            self._counts.repeated += 1
            return False
        self._ids[feedback.id] = None
        while len(self._ids) > self.config.remembered:
            del self._ids[next(iter(self._ids))]
        self._sampler = None
        self.step = max(self.step, feedback.policy_step)
        if feedback.status != "scored" or feedback.success is None:
            self._counts.uninformative += 1
            return False
        age = self.step - feedback.policy_step
        if age > self.config.max_age:
            self._counts.too_old += 1
            return False
        self._counts.observed += 1
        self.learn(feedback, feedback.success, 0.5 ** (age / self.config.age_half_life))
        return True

    def sample(self, n: int, rng: np.random.Generator) -> list[DrawnItem]:
        """Draw n items by the current weights. O(N) after new feedback, O(n log N) otherwise.

        Raises DataError unless `n` is a number of items.
        """
        check_kind("the number of items to draw", n, Integral)
        if n < 0:
            raise DataError(f"the number of items to draw is {n}; give 0 or more.")
        if self._sampler is None:
            snapshot = self.snapshot()
            self._sampler = TaskSampler.from_snapshot(snapshot.weights, snapshot.id)
        return self._sampler.sample(n, rng)

    def snapshot(self) -> ItemWeights:
        """Return the current weights, scaled to sum to N, for environments to draw by. O(N)."""
        weights = self._drawable_weights()
        return ItemWeights.of((weights * (len(weights) / weights.sum())).astype(np.float32), self.observations)

    def _drawable_weights(self) -> NDArray[np.float64]:
        return mask_held_out(self.weights(), self.items.held_out)

    def metrics(self) -> dict[str, float]:
        """Return figures for monitoring under `curriculum/`."""
        counts = self._counts
        weights = self._drawable_weights()
        figures = {
            "observed": counts.observed,
            "repeated": counts.repeated,
            "too_old": counts.too_old,
            "uninformative": counts.uninformative,
            "effective_items": float(weights.sum() ** 2 / (weights**2).sum()),
            **self.figures(),
        }
        return {f"curriculum/{name}": float(value) for name, value in figures.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state (msgpack-able; arrays as little-endian bytes)."""
        counts = self._counts
        return {
            "version": STATE_VERSION,
            "strategy": type(self).__name__,
            "items": self.items.count,
            "step": self.step,
            "counts": [counts.observed, counts.repeated, counts.too_old, counts.uninformative],
            "ids": list(self._ids),
            "arrays": {name: _little(array).tobytes() for name, array in self.arrays().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state.

        Raises SettingsChangedError if it is of another strategy, item count or build, SchemaError if it is malformed;
        nothing was taken over then.
        """
        saved = convert_plain("curriculum state", _SavedStrategy, state)
        if saved.strategy == type(self).__name__ and saved.items == self.items.count:
            saved.arrays = self.completed(saved.arrays)
        change = self._change(saved)
        if change is not None:
            raise SettingsChangedError(change)
        arrays = {
            name: view(saved.arrays[name], cast("DType", array.dtype.name), array.size, f"curriculum state, {name}")
            for name, array in self.arrays().items()
        }
        wrong = self.invalid_array(arrays)
        if wrong is not None:
            raise SchemaError(f"curriculum state: {wrong} holds what cannot be; start a revision")
        self._take_over(saved, arrays)

    def grown(self, items: ItemPool) -> Self:
        """Return the strategy over a larger pool, which begins with the items of this one.

        What it learned stays. Raises ConfigError where an array of its state is neither by item nor of the same shape
        whatever the number of items.
        """
        made = type(self)(items, self.config)
        for name, array in made.arrays().items():
            old = self.arrays()[name]
            if old.shape == array.shape:
                array[...] = old
            elif (len(old), len(array)) == (self.items.count, items.count):
                array[: len(old)] = old
            else:
                raise ConfigError(
                    f"curriculum.strategy {type(self).__name__}: its array {name} has the shape {old.shape} for "
                    f"{self.items.count} items, and {array.shape} for {items.count}. Where clients name the items, "
                    "an array needs one entry an item, or as many whatever the number of items"
                )
        made.load_state_dict(self.state_dict() | {"items": items.count, "arrays": made.state_dict()["arrays"]})
        return made

    def load_moved(self, state: Mapping[str, Any], places: NDArray[np.int64], skills: Sequence[str]) -> None:
        """Take over the state of another pool.

        `places` int64 [N]: where each item was in that, -1 for a new one; `skills` are those that it had. What is known
        of an item goes with it, and of a skill with its name. Raises as `load_state_dict`.
        """
        saved = convert_plain("curriculum state", _SavedStrategy, state)
        if saved.strategy != type(self).__name__ or saved.version != STATE_VERSION:
            raise SettingsChangedError(str(self._change(msgspec.structs.replace(saved, items=self.items.count))))
        moved = {name: array.copy() for name, array in self.arrays().items()}
        known = places >= 0
        was = {skill: index for index, skill in enumerate(skills)}
        for name, array in moved.items():
            kind = cast("DType", array.dtype.name)
            by = self.array_index(name)
            entries = {"item": saved.items, "skill": len(skills), None: len(array)}[by]
            size = entries * math.prod(array.shape[1:])
            if len(saved.arrays.get(name, b"")) != size * array.dtype.itemsize:
                continue  # the number of something else has changed: it is learned again
            before = view(saved.arrays[name], kind, size, f"curriculum state, {name}").reshape(
                entries, *array.shape[1:]
            )
            if by == "item":
                array[known] = before[places[known]]
            elif by == "skill":
                for index, skill in enumerate(self.items.skills):
                    if skill in was:
                        array[index] = before[was[skill]]
            else:
                array[...] = before
        wrong = self.invalid_array({name: array.reshape(-1) for name, array in moved.items()})
        if wrong is not None:
            raise SchemaError(f"curriculum state: {wrong} holds what cannot be; start a revision")
        self._take_over(saved, moved)

    def array_index(self, name: str) -> Literal["item", "skill"] | None:
        """Return what an array of the state has an entry for: each item, each skill, or something else.

        By default what its shape says. Override it where several have the same number.
        """
        shape = self.arrays()[name].shape
        if shape[:1] == (self.items.count,):
            return "item"
        return "skill" if shape[:1] == (len(self.items.skills),) else None

    def _change(self, saved: _SavedStrategy) -> str | None:
        """Return why a saved state cannot be this strategy's, and how to go on; None if it can."""
        old, new = name_of(saved.strategy), name_of(type(self).__name__)
        if saved.strategy != type(self).__name__:
            return (
                f"curriculum.strategy is {new!r} now, but what the run has learned of its items so far was learned by "
                f"{old!r}, which {new!r} cannot use. Set curriculum.strategy back to {old!r}, or {_NEW_RUN}"
            )
        if saved.items != self.items.count:
            return (
                f"there are {self.items.count} items now, but there were {saved.items} when the curriculum learned "
                f"them. Set the environment's params back, or {_NEW_RUN}"
            )
        missing = sorted(self.arrays().keys() - saved.arrays.keys())
        if saved.version != STATE_VERSION or missing:
            what = f"the curriculum's state has no {missing[0]}" if missing else "the curriculum's state"
            return f"{what}: another build of lachesis wrote it. Go on with that build, or {_NEW_RUN}"
        return None

    def _take_over(self, saved: _SavedStrategy, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.step = saved.step
        self._counts = _Counts(*saved.counts)
        self._ids = dict.fromkeys(saved.ids)
        self._sampler = None
        for name, array in self.arrays().items():
            array[...] = arrays[name].reshape(array.shape)


def _little(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + e^-x), without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def finite_sigmoid(x: float) -> float:
    """1 / (1 + e^-x) of one number, without overflow."""
    return 0.5 * (1.0 + math.tanh(0.5 * x))
