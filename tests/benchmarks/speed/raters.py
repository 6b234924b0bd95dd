"""The raters of the measured pipeline: cheap, and seldom the same for all answers of a group."""

from lachesis.pipeline.scorer.rater import Sample, rater

__all__ = ["length", "stopped", "tail"]


@rater(bounds=(0.0, 1.0), inline=True)
def length(sample: Sample) -> float:
    return len(sample.completion) % 101 / 100


@rater(bounds=(0.0, 1.0), inline=True)
def tail(sample: Sample) -> float:
    return ord(sample.completion[-1]) % 32 / 31


@rater(bounds=(0.0, 1.0), inline=True)
def stopped(sample: Sample) -> float:
    return float(sample.finish_reason == "stop")
