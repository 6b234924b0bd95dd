"""Rates how little a completion repeats itself: the share of its n-grams that are distinct."""

import re
from collections.abc import Iterable, Sequence

from lachesis.pipeline.scoring.rater import Sample, rater
from lachesis.schemas.errors import ConfigError

__all__ = ["repetition"]

_UNSPACED = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029"
    "\u3041-\u312f\u3131-\u318f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua980-\ua9df\uaa00-\uaadf\uf900-\ufaff\uff66-\uff9d"
    "\U00016f00-\U00016fff\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
"""Thai, Lao, Tibetan, Burmese, Khmer, Tai, Javanese, Cham, Chinese and Japanese: no blanks between words."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_MAX_WORD_CHARS = 32
"""Characters of a word; longer ones are no words, and each of their characters counts."""


@rater(bounds=(0.0, 1.0), version="2")
def repetition(sample: Sample, *, n: int = 3) -> float:
    """Return distinct / all n-grams of words: 1 for fewer than n words, 0 for none.

    A character is a word of its own in scripts without blanks between words, and in runs of more than 32 characters.
    """
    if n < 1:
        raise ConfigError(f"rater repetition: n is {n}; it must be at least 1.")
    words = list(_words(sample.completion))
    if not words:
        return 0.0
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _words(text: str) -> Iterable[str]:
    for word in _WORD.findall(text):
        units: Sequence[str] = word if len(word) > _MAX_WORD_CHARS else [word]
        yield from units
