"""Rates 1 if the answer equals the reference, else 0."""

from lachesis.pipeline.scorer.answers.given_and_reference import any_of, check_pattern, given
from lachesis.pipeline.scorer.rater import Sample, rater

__all__ = ["exact_match"]


@rater(bounds=(0.0, 1.0), inline=True, version="3", apart=("pattern",), check=check_pattern)
def exact_match(sample: Sample, *, pattern: str | None = None, ignore_case: bool = False) -> float | None:
    """Compare the answer with the reference, both stripped of surrounding white space, in one form
    of Unicode (NFC) and of line ends; the thinking before the answer does not count.

    `pattern` finds the answer in the completion (default: all of it after the thinking). Abstains if the
    task has no answer.
    """
    answer = given(sample, pattern)

    def rate(expected: str) -> float:
        if answer is None:
            return 0.0
        return float(answer.casefold() == expected.casefold() if ignore_case else answer == expected)

    return any_of(sample, rate)
