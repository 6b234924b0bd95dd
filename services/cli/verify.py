"""`lachesis verify`: checks raters, advantages and the loss numerically on recorded rollouts."""

from collections import defaultdict
from typing import Annotated

import anyio
import typer

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.offline.verification.checks import NumericFinding
from lachesis.pipeline.offline.verification.recorded import check_loss, check_raters, newest_groups
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import RolloutGroup
from lachesis.services.cli.findings import exit_with, print_findings
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.output import print_json
from lachesis.services.run.connect import open_history
from lachesis.services.run.lost_history import warn_of_losses

__all__ = ["verify"]


@with_options
def verify(
    options: Options,
    groups: Annotated[int, typer.Option(min=1, help="Newest recorded groups to verify with.")] = 32,
    runs: Annotated[int, typer.Option(min=2, help="Times that each sample is rated.")] = 3,
    atol: Annotated[
        float, typer.Option(min=0.0, help="Largest difference at which two ratings count as equal.")
    ] = 1e-6,
    as_json: Json = False,
) -> None:
    """Check raters, advantages and the loss numerically on recorded rollouts; exit with 1 on failure."""
    config = options.config()
    recorded = anyio.run(_recorded, config, groups)
    if not recorded:
        raise ConfigError(f"run {config.run} has no rollouts to verify with; start it, or name another with --run")
    findings: list[NumericFinding] = []
    by_env: defaultdict[str, list[RolloutGroup]] = defaultdict(list)
    for group in recorded:
        by_env[group.env].append(group)
    for env, of_env in by_env.items():
        settings = config.environments.get(env)
        scoring = (settings.scoring if settings else None) or config.scoring
        if scoring.raters:
            findings += anyio.run(check_raters, config, scoring, of_env, runs, atol)
    findings += check_loss(config, recorded)
    if as_json:
        print_json(findings)
    else:
        print_findings(findings)
    exit_with(findings)


async def _recorded(config: RunConfig, count: int) -> list[RolloutGroup]:
    async with open_history(config, f"{config.run}.verify") as bus:
        await warn_of_losses(bus, config)
        return await newest_groups(bus, config.run, count)
