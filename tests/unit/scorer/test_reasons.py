"""Why ratings are missing is logged, once: the events carry no more than the status."""

import logging

import pytest

from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.rater import Rating
from lachesis.pipeline.scorer.scorer import EnvironmentScorer


def test_a_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    scorer = EnvironmentScorer(ScoringConfig(raters=[RaterConfig(rater="exact_match")]), None)
    missing = {"loud": [Rating(None, "error", "returned 7.0"), Rating(1.0), Rating(None, "abstain")]}
    with caplog.at_level(logging.WARNING, "lachesis"):
        for _ in range(3):
            scorer._log_failures(missing)
    assert [record.getMessage() for record in caplog.records] == ["rater loud: error, returned 7.0"]
