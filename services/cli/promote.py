"""`lachesis promote`: a run goes on with a revision, from a rollout on that the ledger names."""

import getpass
import os
import socket
import sys
import time
from typing import Annotated

import anyio
import msgspec
import typer

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import FencedError, NotFoundError
from lachesis.pipeline.normalizer.estimators.loader import describe_estimator
from lachesis.pipeline.offline.replay.logic.rollout_filter import differences
from lachesis.pipeline.offline.replay.revisions import ensembles_of, overridden_normalizations
from lachesis.pipeline.offline.replay.scoring import load_scorers
from lachesis.pipeline.promotion.logic import request
from lachesis.pipeline.promotion.record import read_promotions, write_promotions
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.promotion import Promotion
from lachesis.schemas.replay import RevisionRecord
from lachesis.schemas.subjects import REPLAY
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.output import print_json
from lachesis.services.promotion import make_promotion
from lachesis.services.run.connect import connect_run

__all__ = ["promote"]

_POLL_S = 0.2


@with_options
def promote(
    options: Options,
    revision: Annotated[str, typer.Argument(metavar="NAME", help="A revision that a shadow or a replay wrote.")],
    *,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Give up earlier rollouts that wait for unavailable raters.")
    ] = False,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, metavar="S", help="Seconds to wait for the decision.")
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Switch the live run to a revision; --config is the configuration that made it.

    The ledger says from which rollout on, and who requested it; nothing is restarted. Earlier rollouts are scored as
    before; with --give-up those that cannot be scored become dead letters, and `lachesis dead requeue` has the revision
    score them. The promotion overrides the configuration file, also after a restart, until the next promotion. Raters
    and estimators of your own, and raters with a regular expression, must be named by the configuration of the
    services, with their params: see `scoring.promotable` and `advantage.promotable`.
    """
    config = options.config_with_environments("the revision's")
    found, follows = anyio.run(_promote, config, subjects.check_name("revision", revision), give_up, wait_s)
    if as_json:
        print_json(found)
    elif found.first is not None:
        print(f"revision {revision} scores rollouts from sequence {found.first} on; requested by {found.by}")
        if follows:
            print(f"its shadow, if it still runs, does the same work twice: lachesis shadow stop {revision}")
    if found.first is None:
        print(
            f"requested, and not decided within {wait_s:g} s: the batcher decides as soon as it runs, and scorers "
            "wait for it. Repeat the command to see the state",
            file=sys.stderr,
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # containers run by a number that has no name
        return f"uid {os.getuid()}"


async def _promote(config: RunConfig, revision: str, give_up: bool, wait_s: float) -> tuple[Promotion, bool]:
    """Return the promotion, decided or not, and whether the revision is a shadow's."""
    async with await connect_run(config, f"{config.run}.promote", OPERATOR) as bus:
        defined = await _check(bus, config, revision)
        by = f"{_user()}@{socket.gethostname()}"
        asked = make_promotion(config, revision, by=by, asked_ns=time.time_ns(), give_up=give_up)
        while True:
            known, expected = await read_promotions(bus, config.run, config.revision)
            wanted = request(config.run, known, asked)
            if wanted is None:
                break
            try:
                await write_promotions(bus, wanted, config.revision, expected=expected)
            except FencedError:
                continue  # somebody else promotes at this moment
            known = wanted.promotions
            break
        found = known[-1]
        with anyio.move_on_after(wait_s):
            while found.first is None:
                await anyio.sleep(_POLL_S)
                found = (await read_promotions(bus, config.run, config.revision))[0][-1]
        return found, defined.selection.follow


async def _check(bus: Bus, config: RunConfig, revision: str) -> RevisionRecord:
    """Return what defines `revision`. Raise unless `revision` was tried on this run, under this configuration."""
    run = config.run
    defined, _, _ = await read_last_event(
        bus, REPLAY, subjects.revision(run, revision), RevisionRecord, lambda one: one.run == run
    )
    if defined is None:
        raise NotFoundError(
            f"run {run} has no revision {revision!r}: try it first, with `lachesis shadow start {revision}` or "
            f"`lachesis replay --revision {revision}`"
        )
    untried = sorted(set(config.environments) - set(defined.judges))
    if untried:
        raise ConfigError(
            f"revision {revision!r} has no settings for environment {untried[0]!r}; promote a revision that covers "
            "all of them"
        )
    tried = {env: judges for env, judges in defined.judges.items() if env in config.environments}
    asked = defined.replace(
        judges=ensembles_of(config, load_scorers(config, config.environments)),
        normalization=msgspec.to_builtins(config.normalization),
        normalizations=overridden_normalizations(config, config.environments),
        advantage={env: describe_estimator(config.advantage_of(env)) for env in config.environments},
    )
    stored = defined.replace(judges=tried, advantage={env: defined.advantage[env] for env in tried})
    if changed := differences(stored, asked):
        raise ConfigError(
            f"the configuration is not that of revision {revision!r}: {'; '.join(changed)}. Give the one that it was "
            "started with"
        )
    return defined
