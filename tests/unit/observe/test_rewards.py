"""Rewards by environment and rater, and evaluations, out of the figures of a step."""

from lachesis.services.observe.evaluations import evaluation_rows_of_figures, evaluation_summary
from lachesis.services.observe.rewards import EnvRewards, describe_rewards, rewards_of

FIGURES = {
    "reward/mean": 0.5,
    "reward/sums/mean": 0.25,
    "reward/sums/rater/numeric": 0.2,
    "reward/sums/rater/a/b": 0.3,
    "reward/sums/reliability_alpha": 0.9,
    "reward_norm/sums/score/mean": 7.0,
}


def test_of_one_environment_the_raters_are_told_and_of_several_each_one() -> None:
    one = rewards_of(FIGURES)
    assert one == {"sums": EnvRewards(mean=0.25, raters={"a/b": 0.3, "numeric": 0.2})}
    assert describe_rewards(0.5, one) == "0.5 in the newest step (lately a/b 0.3, numeric 0.2)"
    several = rewards_of({**FIGURES, "reward/words/rater/form": 1.0})
    several_text = "0.5 in the newest step; sums 0.25 (lately a/b 0.3, numeric 0.2); words - (lately form 1)"
    assert describe_rewards(0.5, several) == several_text
    assert describe_rewards(None, {}) == ""


def test_a_rater_that_prefers_long_answers_or_whose_verdicts_flip_is_shown_so() -> None:
    found = rewards_of(
        {
            "reward/sums/rater/judge": 0.5,
            "reward/sums/rater/judge/flipped": 0.25,
            "reward/sums/length_bias/judge": 0.42,
            "reward/sums/rater/numeric": 0.2,
            "reward/sums/length_bias/numeric": -0.1,
        }
    )
    assert found["sums"].length_bias == {"judge": 0.42, "numeric": -0.1}
    assert describe_rewards(None, found) == "(lately judge 0.5 [length +0.42], judge/flipped 0.25, numeric 0.2)"


def test_an_evaluation_is_read_back_from_the_figures() -> None:
    figures = {"eval/sums/avg@4": 0.4, "eval/sums/low": 0.34, "eval/sums/high": 0.46,
               "eval/sums/step": 10.0, "eval/words/pass@4": 1.0}  # fmt: skip
    (row,) = evaluation_rows_of_figures(figures)
    assert (row.env, row.step, row.rate, row.samples, row.items, row.greedy) == ("sums", 10, 0.4, 4, None, None)
    assert evaluation_summary(row, named=False) == "0.40 [0.34, 0.46] (step 10)"
