"""Rates how close the answer is to the reference: 1 - edit distance / length of the longer one."""

from lachesis.pipeline.scorer.answers.given_and_reference import any_of, check_pattern, given
from lachesis.pipeline.scorer.rater import Sample, rater

__all__ = ["levenshtein", "similarity"]


@rater(bounds=(0.0, 1.0), version="3", apart=("pattern",), check=check_pattern)
def similarity(sample: Sample, *, pattern: str | None = None) -> float | None:
    """Return the normalised Levenshtein similarity. Abstains if the task has no answer."""
    answer = given(sample, pattern)

    def rate(expected: str) -> float:
        return 0.0 if answer is None else 1.0 - levenshtein(expected, answer) / max(len(expected), len(answer))

    return any_of(sample, rate)


def levenshtein(a: str, b: str) -> int:
    """Return the edit distance (insert, delete, replace, each 1).

    Bit-parallel (Myers 1999, in the form of Hyyro 2003): a column of the distance matrix is one integer of len(longer)
    bits, so a long completion against a short reference takes a few big-integer operations a reference character.
    """
    if len(a) < len(b):
        a, b = b, a
    if not b:
        return len(a)
    positions: dict[str, int] = {}
    for i, char in enumerate(a):
        positions[char] = positions.get(char, 0) | 1 << i
    full = (1 << len(a)) - 1
    last = 1 << (len(a) - 1)
    plus, minus, distance = full, 0, len(a)
    for char in b:
        match = positions.get(char, 0)
        diagonal = (((match & plus) + plus) ^ plus) | match | minus
        up = minus | ~(diagonal | plus) & full
        down = plus & diagonal
        distance += bool(up & last) - bool(down & last)
        up = up << 1 | 1
        plus = (down << 1 | ~(diagonal | up)) & full
        minus = up & diagonal
    return distance
