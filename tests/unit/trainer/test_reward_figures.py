"""The rewards of a step, of all its groups and by environment."""

from lachesis.pipeline.trainer.metrics import reward_figures
from lachesis.schemas.ledger import GroupRef


def ref(env, score):
    return GroupRef(
        group="0" * 32, seq=1, env=env, sequences=2, tokens=4, policy_step=0, advantages=[0.0, 0.0], score=score
    )


def test_rewards_are_told_of_each_environment_and_missing_scores_are_left_out():
    groups = [ref("sums", 0.25), ref("sums", None), ref("words", 1.0), ref("sums", 0.25), ref("games", None)]
    assert reward_figures(groups) == {"reward/mean": 0.5, "reward/sums/mean": 0.25, "reward/words/mean": 1.0}
    assert reward_figures([ref("sums", None)]) == {}
