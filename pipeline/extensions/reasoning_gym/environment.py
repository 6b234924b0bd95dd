"""Provides tasks of reasoning-gym as an environment.

It offers any dataset by name, with its parameters and its own scorer. From a dataset's name, a seed and a split it
makes tasks. Their `task` is `{"dataset", "question", "answer", "metadata"}`, which is all that `score_answer` needs to
score an answer in any process.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

import anyio
import anyio.to_process
import msgspec

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.environment.environment import Environment, Reward
from lachesis.pipeline.environment.plain_hooks import HOOKS
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.extensions.reasoning_gym.datasets import create_dataset, draw, load_scorer, score_answer
from lachesis.pipeline.tasks.splits import Split
from lachesis.pipeline.tasks.task import Task, prompt_hash
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

__all__ = ["ReasoningGym", "Splits"]

_SCORING_TIMEOUT_S = 10.0
_VIRTUAL_SIZE = 200_000
"""The same for every pool, because the items of some datasets depend on their number."""


class Splits(NamedTuple):
    """Three environments without a common prompt."""

    train: "ReasoningGym"
    held_out: "ReasoningGym"
    warm_start: "ReasoningGym"


class ReasoningGym(Environment):
    """One split of one dataset."""

    def __init__(
        self,
        dataset: str,
        *,
        split: Split = "train",
        size: int = 1000,
        seed: int = 0,
        params: dict[str, Any] | None = None,
        difficulty_key: str | None = None,
        skill_key: str | None = None,
        system: str | None = None,
        answer_tag: str | None = None,
        own_reward: bool = False,
    ) -> None:
        """Draw `size` tasks of `split`.

        `params`: the dataset's own settings (`min_word_len`, ...), and `size`, its virtual size, which acre and
        word_ladder need smaller than the 200,000 set here. `difficulty_key`, `skill_key`: where in an item's
        metadata its difficulty (a number) and its skill stand, dots leading deeper; by default the difficulty is the
        first number that the item has under a name listed in its `difficulty`, and the dataset is one skill.
        `system`: a system message. `answer_tag`: the answer is what stands between the last `<tag>` and `</tag>`.
        `own_reward`: put the dataset's score into the rollout, for runs without raters.
        Raises ConfigError when the dataset or a parameter is unknown, or has fewer distinct prompts than `size`.
        """
        self.dataset = dataset
        self.split = split
        self.own_reward = own_reward
        self._params = dict(params or {})
        self._difficulty_key = difficulty_key
        self._skill_key = skill_key
        self._system = system
        self._answer_tag = answer_tag
        self._scoring = anyio.Lock()
        self._scorer_of: asyncio.AbstractEventLoop | None = None
        if size < 1:
            raise ConfigError(f"reasoning_gym: size is {size}, and must be at least 1")
        self._entries = draw(create_dataset(dataset, {"size": _VIRTUAL_SIZE, **self._params}, seed), split, size)

    @classmethod
    def splits(
        cls, dataset: str, *, train: int, held_out: int, warm_start: int, seed: int = 0, **settings: Any
    ) -> Splits:
        """Return all three splits with the given sizes; `settings` as for the class."""
        pools = Splits(
            cls(dataset, split="train", size=train, seed=seed, **settings),
            cls(dataset, split="held_out", size=held_out, seed=seed, **settings),
            cls(dataset, split="warm_start", size=warm_start, seed=seed, **settings),
        )
        hashes = [pool.prompt_hashes() for pool in pools]
        if len(frozenset().union(*hashes)) != train + held_out + warm_start:
            raise AssertionError("two splits share a prompt: split_of is not a function of the prompt")
        return pools

    def __len__(self) -> int:
        return len(self._entries)

    def task(self, index: int) -> Task:
        """Return the task of `index`; its item id is derived from the prompt."""
        entry = self._entries[index]
        metadata = _plain(entry["metadata"])
        question = entry["question"]
        about = {"dataset": self.dataset, "question": question, "answer": entry["answer"], "metadata": metadata}
        if self._answer_tag:
            about["answer_tag"] = self._answer_tag
        system = [Message(role="system", content=self._system)] if self._system else []
        skill = _lookup(metadata, self._skill_key) if self._skill_key else None
        return Task(
            item=f"{self.dataset}-{prompt_hash(question)[:16]}",
            prompt=[*system, Message(role="user", content=question)],
            task=about,
            skill=self.dataset if skill is None else f"{self.dataset}/{skill}",
            difficulty=self._difficulty(metadata),
        )

    def prompt_hashes(self) -> frozenset[str]:
        """Return the hashes of all prompts of this pool."""
        return frozenset(prompt_hash(entry["question"]) for entry in self._entries)

    def pairs(self) -> Iterable[tuple[str, str]]:
        """Yield (question, reference answer) of the items that have one, for a supervised warm start."""
        return ((entry["question"], entry["answer"]) for entry in self._entries if entry["answer"] is not None)

    async def reward(self, task: Task, session: Session) -> Reward:
        return {"reasoning_gym": await self.score(task, session)} if self.own_reward else {}

    async def score(self, task: Task, session: Session) -> float | None:
        """Return the dataset's own score of the last reply, None when its scorer took longer than ten seconds.

        Scorers parse what a model wrote and some can hang on it: they run in a process that can be killed, one at a
        time, so that neither its start nor a queue of other answers counts as the scorer's time.
        """
        async with self._scoring:
            loop = asyncio.get_running_loop()  # each has worker processes of its own
            if self._scorer_of is not loop:
                try:
                    await anyio.to_process.run_sync(load_scorer, self.dataset, self._params)
                except anyio.BrokenWorkerProcess as error:
                    raise StartupError(
                        f"the process that runs the scorer of {self.dataset} did not start: {error.__cause__}. "
                        "It imports the program that started it: put the program's code beneath "
                        '`if __name__ == "__main__":`'
                    ) from error
                self._scorer_of = loop
            score = None
            with HOOKS.move_on_after(_SCORING_TIMEOUT_S) as scope:
                score = await anyio.to_process.run_sync(
                    score_answer, session.text, task.task, self._params, cancellable=True
                )
            self._scorer_of = None if scope.cancelled_caught else loop
            return score

    def _difficulty(self, metadata: dict[str, Any]) -> float | None:
        if self._difficulty_key:
            value = _lookup(metadata, self._difficulty_key)
            if not _is_number(value):
                raise ConfigError(
                    f"reasoning_gym: metadata of {self.dataset} has no number under difficulty_key "
                    f"{self._difficulty_key!r}{nearest(self._difficulty_key, metadata)}"
                )
            return float(value)
        levels = metadata.get("difficulty")
        if _is_number(levels):
            return float(levels)
        for name, level in (levels if isinstance(levels, dict) else {}).items():
            for value in (metadata.get(name), level):
                if _is_number(value):
                    return float(value)
        return None


def _plain(value: Any) -> Any:
    """Return metadata as it will be after the wire: tuples become lists, numpy's scalars and arrays Python's."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=lambda other: other.tolist()))


def _lookup(metadata: Mapping[str, Any], key: str) -> Any:
    value: Any = metadata
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
