"""Makes the rule that turns an environment's scores into rewards, from the configuration.

The live run and replays share it.
"""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.normalizer.logic.reward import RewardRule

__all__ = ["reward_rule"]


def reward_rule(config: RunConfig, env: str) -> RewardRule:
    """Return the rule of environment `env`."""
    scoring = config.scoring_of(env)
    return RewardRule(
        config.advantage_of(env),
        config.reward_config_of(env),
        reliability=bool(scoring.raters) and scoring.aggregation == "reliability",
    )
