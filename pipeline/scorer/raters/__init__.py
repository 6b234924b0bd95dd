"""Built-in raters, one a module of its name; each loads only when an ensemble names it."""

from lachesis.pipeline.extension import with_added

__all__ = ["rater_places", "shipped_raters"]

_HERE = "lachesis.pipeline.scorer.raters"

_BUILTIN = {
    "code": f"{_HERE}.code:CodeRater",
    "exact_match": f"{_HERE}.exact_match:exact_match",
    "format": f"{_HERE}.format:well_formed",
    "json_valid": f"{_HERE}.json_valid:json_valid",
    "language": f"{_HERE}.language:language",
    "length": f"{_HERE}.length:length",
    "llm_judge": f"{_HERE}.llm_judge:LLMJudge",
    "math": f"{_HERE}.math:MathRater",
    "numeric": f"{_HERE}.numeric:numeric",
    "pairwise_judge": f"{_HERE}.pairwise_judge:PairwiseJudge",
    "repetition": f"{_HERE}.repetition:repetition",
    "reward_model": f"{_HERE}.reward_model:RewardModel",
    "rubric_judge": f"{_HERE}.rubric_judge:RubricJudge",
    "similarity": f"{_HERE}.similarity:similarity",
}


def rater_places() -> dict[str, str]:
    """Return by name the `module:name` of each rater, those of extensions too."""
    return with_added("raters", _BUILTIN)


def shipped_raters() -> dict[str, str]:
    """Return those of them that this project itself brings."""
    return {name: place for name, place in rater_places().items() if place.startswith("lachesis.")}
