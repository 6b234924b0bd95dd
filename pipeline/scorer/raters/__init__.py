"""Built-in raters, one a module; each loads only when an ensemble names it."""

__all__ = ["BUILTIN"]

_HERE = "lachesis.pipeline.scorer.raters"

BUILTIN = {
    "code": f"{_HERE}.code:CodeRater",
    "exact_match": f"{_HERE}.exact_match:exact_match",
    "format": f"{_HERE}.format:well_formed",
    "json_valid": f"{_HERE}.json_valid:json_valid",
    "llm_judge": f"{_HERE}.llm_judge:LLMJudge",
    "math": f"{_HERE}.math_rater:MathRater",
    "length": f"{_HERE}.length:length",
    "numeric": f"{_HERE}.numeric:numeric",
    "reasoning_gym": f"{_HERE}.reasoning_gym:ReasoningGymRater",
    "repetition": f"{_HERE}.repetition:repetition",
    "reward_model": f"{_HERE}.reward_model:RewardModel",
    "similarity": f"{_HERE}.similarity:similarity",
}
"""Names for configuration -> module:name."""
