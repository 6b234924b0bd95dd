"""`lachesis verify` on groups in memory: what it finds of an ensemble of verdicts, and of an estimator."""

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.offline.verification.recorded import check_raters
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.schemas.rollout import Message

RATERS = [RaterConfig(rater="exact_match", name="exact"), RaterConfig(rater="numeric"), RaterConfig(rater="similarity")]


def talk(*answers):
    return [[Message(role="user", content="1+1?"), Message(role="assistant", content=answer)] for answer in answers]


async def test_an_ensemble_of_verdicts_is_told_the_weights_of_its_raters(lab):
    groups = [lab.group(n, task={"answer": "2"}, messages=talk("2", "3")) for n in range(8)]
    for aggregation, says in (("majority", True), ("dawid_skene", True), ("uwo", False)):
        scoring = ScoringConfig(raters=RATERS, aggregation=aggregation)
        sums = EnvironmentConfig(kind="x", scoring=scoring, advantage=AdvantageConfig(estimator="gdpo"))
        config = RunConfig(run="r", environments={"sums": sums})
        found = await check_raters(config, scoring, groups, 2, 1e-6)
        accuracies = {finding.subject: finding for finding in found if finding.check == "accuracy"}
        assert set(accuracies) == ({"exact", "numeric", "similarity"} if says else set())
        assert all("16 verdicts" in finding.text for finding in accuracies.values())
        (stability,) = [finding for finding in found if finding.check == "advantage stability"]
        assert (stability.subject, stability.verdict) == ("gdpo", "ok")
