"""Rates 1 if the completion has the wanted form and ended by itself, else 0."""

from lachesis.pipeline.scorer.answers.given_and_reference import check_pattern, compiled
from lachesis.pipeline.scorer.rater import Sample, rater

__all__ = ["well_formed"]


@rater(bounds=(0.0, 1.0), name="format", version="2", apart=("pattern",), check=check_pattern)
def well_formed(sample: Sample, *, pattern: str = r"\s*\S.*", finished: bool = True) -> float:
    """Match the whole completion against `pattern`, behind a <think> that the prompt ends with.

    With `finished`, its finish reason must be "stop" as well.
    """
    if finished and sample.finish_reason != "stop":
        return 0.0
    return float(compiled(pattern).fullmatch(sample.text) is not None)
