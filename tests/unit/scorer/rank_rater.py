"""A rater that compares the samples of a group, for tests of what leaves such raters out."""

from lachesis.pipeline.scorer.rater import Rater

__all__ = ["Ranks"]


class Ranks(Rater):
    """Rates the samples of a group by their places."""

    name, bounds = "ranks", (0.0, 1.0)

    def rate_group(self, samples):
        return [i / len(samples) for i in range(len(samples))]
