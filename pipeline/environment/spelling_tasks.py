"""Provides tasks of spelling made-up words backward, for first runs and for the demo.

They need no data and no package. A seed, a split and the lengths of words give tasks with an `answer`; difficulty is
the word's length. Guarantees that splits have no word in common, whatever their seeds and sizes, and that a larger pool
begins with the smaller one.
"""

import random
from collections.abc import Iterator

from lachesis.pipeline.environment.environment import Environment, Reward
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.tasks.splits import Split, split_of
from lachesis.pipeline.tasks.task import Task, prompt_hash
from lachesis.schemas.errors import ConfigError

__all__ = ["SpellBackward"]

_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnprstvwyz"
_ALTERNATE = 0.8
"""How often a vowel follows a consonant, and the other way round, so that words look natural."""
_MAX_DRAWS = 1000
"""Words in a row that are known already, after which there are counted to be no more."""
_QUESTION = "Spell this word backward (example: sun -> nus): {word}"


class SpellBackward(Environment):
    """One split of the words of some lengths."""

    def __init__(
        self,
        *,
        split: Split = "train",
        size: int = 1000,
        seed: int = 0,
        min_length: int = 3,
        max_length: int = 8,
        own_reward: bool = False,
    ) -> None:
        """Draw `size` words of `split`, of `min_length` to `max_length` letters.

        `own_reward`: put 1 for the right answer, else 0, into the rollout, for runs without raters. Raises
        `ConfigError` when there are fewer words.
        """
        if not 1 <= min_length <= max_length:
            raise ConfigError(f"spell_backward: min_length is {min_length}, max_length {max_length}; 1 <= min <= max")
        if size < 1:
            raise ConfigError(f"spell_backward: size is {size}, and must be at least 1")
        self.own_reward = own_reward
        self._words = list(_draw(split, size, random.Random(f"{seed}/{split}"), (min_length, max_length)))

    def __len__(self) -> int:
        return len(self._words)

    def task(self, index: int) -> Task:
        word = self._words[index]
        return Task(
            item=f"spell_backward-{word}",
            prompt=_QUESTION.format(word=word),
            task={"answer": word[::-1]},
            skill="spell_backward",
            difficulty=float(len(word)),
        )

    def reward(self, task: Task, session: Session) -> Reward:
        return {"accuracy": float(session.text.strip() == task.task["answer"])} if self.own_reward else {}

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield (question, answer) of all tasks, for a supervised warm start."""
        return ((_QUESTION.format(word=word), word[::-1]) for word in self._words)

    def prompt_hashes(self) -> frozenset[str]:
        """Return the hashes of all prompts of this pool."""
        return frozenset(prompt_hash(_QUESTION.format(word=word)) for word in self._words)


def _draw(split: Split, size: int, draw: random.Random, lengths: tuple[int, int]) -> Iterator[str]:
    known: set[str] = set()
    in_vain = 0
    while len(known) < size:
        word = _word(draw, draw.randint(*lengths))
        if word in known or split_of(word) != split:
            in_vain += 1
            if in_vain > _MAX_DRAWS:
                raise ConfigError(
                    f"spell_backward: found only {len(known)} words for split {split!r} where size asks for {size}; "
                    "ask for fewer, or for longer ones (max_length)"
                )
            continue
        in_vain = 0
        known.add(word)
        yield word


def _word(draw: random.Random, length: int) -> str:
    letters: list[str] = []
    vowel = draw.random() < 0.5
    for _ in range(length):
        letters.append(draw.choice(_VOWELS if vowel else _CONSONANTS))
        vowel = not vowel if draw.random() < _ALTERNATE else vowel
    return "".join(letters)
