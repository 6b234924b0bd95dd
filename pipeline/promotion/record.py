"""The list of a run's promotions: read, changed by compare-and-set, and looked at by whoever judges rollouts."""

import logging
from typing import Any

import anyio
import msgspec

from lachesis.pipeline.advantage.config import AdvantageConfig
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.newest import newest
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.normalization.config import NormalizationConfig
from lachesis.pipeline.promotion.logic import given_up, in_force, settings_digest, undecided
from lachesis.pipeline.scoring.config import ScoringConfig
from lachesis.pipeline.shaping.config import RewardConfig
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import ConfigError, InfrastructureError
from lachesis.schemas.promotion import Judging, Promotion, Promotions
from lachesis.schemas.subjects import LEDGER

__all__ = ["InForce", "promotion", "read", "subject", "under", "write"]

log = logging.getLogger("lachesis")

_LOOK_AGAIN_S = 0.05
_OF_THE_PROCESS = frozenset({"groups_at_once", "patience_s"})
"""Settings of scoring that judge nothing."""


def subject(run: str, revision: str) -> str:
    """Return where the promotions of the run's `revision` are listed."""
    return subjects.state(run, "promotion", revision, "all")


def promotion(config: RunConfig, revision: str, *, by: str, asked_ns: int, give_up: bool = False) -> Promotion:
    """Return the promotion of `revision`, whose settings are those of `config`."""
    environments = {
        env: Judging(
            scoring=_judging(config.scoring_of(env)),
            normalization=msgspec.to_builtins(config.normalization_of(env)),
            reward_config=msgspec.to_builtins(config.reward_config_of(env)),
            advantage=msgspec.to_builtins(config.advantage_of(env)),
            success_rater=settings.success_rater,
            success_threshold=settings.success_threshold,
        )
        for env, settings in config.environments.items()
    }
    std_floor = config.advantage.std_floor
    return Promotion(
        revision=revision,
        digest=settings_digest(environments, std_floor),
        by=by,
        asked_ns=asked_ns,
        environments=environments,
        std_floor=std_floor,
        give_up=give_up,
    )


def _judging(scoring: ScoringConfig) -> dict[str, Any]:
    settings: dict[str, Any] = msgspec.to_builtins(scoring)
    return {name: value for name, value in settings.items() if name not in _OF_THE_PROCESS}


def under(one: Promotion, config: RunConfig) -> RunConfig:
    """Return `config` as it is under a promotion; an environment that this says nothing of stays as it is.

    Raises `ConfigError` where the two do not go together, or this build does not know what the promotion sets.
    """
    environments = dict(config.environments)
    for env in environments.keys() & one.environments.keys():
        try:
            environments[env] = _judged(environments[env], one.environments[env])
        except msgspec.ValidationError as error:  # a newer build's settings, or such as it alone allows
            raise ConfigError(f"revision {one.revision}, environment {env}: {error}; upgrade this service") from error
    return msgspec.structs.replace(config, environments=environments)


def _judged(settings: EnvironmentConfig, judging: Judging) -> EnvironmentConfig:
    return msgspec.structs.replace(
        settings,
        scoring=msgspec.convert(judging.scoring, ScoringConfig),
        normalization=msgspec.convert(judging.normalization, NormalizationConfig),
        reward_config=msgspec.convert(judging.reward_config, RewardConfig),
        advantage=msgspec.convert(judging.advantage, AdvantageConfig),
        success_rater=judging.success_rater,
        success_threshold=judging.success_threshold,
    )


async def read(bus: Bus, run: str, revision: str) -> tuple[list[Promotion], int]:
    """Return the promotions, and the last sequence on their subject, which the next `write` must expect."""
    found, _, last = await newest(bus, LEDGER, subject(run, revision), Promotions, lambda one: one.run == run)
    return (found.promotions if found else []), last


async def write(bus: Bus, promotions: Promotions, revision: str, *, expected: int) -> int:
    """Store the list and return its sequence. Raises `FencedError` where somebody else wrote meanwhile."""
    promotions.check()
    name = subject(promotions.run, revision)
    last = promotions.promotions[-1]
    msg_id = f"{name}.{expected}.{last.revision}.{last.asked_ns}.{last.first}"
    return await bus.commit(name, encode(promotions), expected=expected, msg_id=msg_id)


class InForce:
    """Which promotion judges a rollout, as told after it was stored.

    One look serves everybody who asked before it began, and every rollout stored by then: behind a backlog there are
    few, and nobody waits for more than one that is under way and the next.
    """

    def __init__(self, bus: Bus, run: str, revision: str) -> None:
        self._bus, self._run, self._revision = bus, run, revision
        self._promotions: list[Promotion] = []
        self._stored_to = 0  # by what was asked: a delivered rollout is stored, and all below are
        self._known_to = 0
        self._looking = anyio.Lock()

    async def at(self, seq: int) -> Promotion | None:
        """Return what judges the rollout at `seq`, which is stored; None: the run's configuration.

        Raises `InfrastructureError` while that cannot be told.
        """
        self._stored_to = max(self._stored_to, seq)
        if seq > self._known_to:
            async with self._looking:
                if seq > self._known_to:  # whoever looked meanwhile began before this rollout was known to be there
                    await self._look()
        return in_force(self._promotions, seq)

    async def given_up(self, seq: int) -> Promotion | None:
        """Return the promotion that gives up the rollout at `seq`, whose raters are away, by the list as it is now.

        Raises `InfrastructureError` as `at`.
        """
        async with self._looking:
            await self._look()
        return given_up(self._promotions, seq)

    async def _look(self) -> None:
        last = self._stored_to
        promotions, _ = await read(self._bus, self._run, self._revision)
        if undecided(promotions) is not None:
            await anyio.sleep(_LOOK_AGAIN_S)
            raise InfrastructureError(
                f"revision {promotions[-1].revision} is being promoted, and the batcher has not said from where on"
            )
        for one in promotions[len(self._promotions) :]:
            log.info("revision %s, promoted by %s, judges from sequence %d on", one.revision, one.by, one.first)
        self._promotions, self._known_to = promotions, last
