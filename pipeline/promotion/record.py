"""The list of a run's promotions.

It is changed by compare-and-set, and read by every service that scores rollouts.
"""

import logging
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.commit_ids import commit_id
from lachesis.pipeline.bus.last_event import decode_owned, read_last_event
from lachesis.pipeline.bus.left_out import read_left_out
from lachesis.pipeline.config.paths import code_name
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.config.secrets import masked
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.normalizer.config.advantage import ESTIMATORS, AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.promotion.logic import (
    active_promotion,
    giving_up_promotion,
    settings_digest,
    undecided_promotion,
)
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import ConfigError, VersionError
from lachesis.schemas.promotion import Promotion, Promotions, RewardSettings
from lachesis.schemas.subjects import ROLLOUTS

__all__ = ["ActivePromotion", "config_under_promotion", "promotion", "read_promotions", "write_promotions"]

log = logging.getLogger("lachesis")

_POLL_S = 0.05
_OF_THE_PROCESS = frozenset({"groups_at_once", "patience_s", "promotable"})
"""Settings of scoring and advantages that judge nothing."""


def promotion(config: RunConfig, revision: str, *, by: str, asked_ns: int, give_up: bool = False) -> Promotion:
    """Return the promotion of `revision`, whose settings are those of `config`."""
    environments = {
        env: RewardSettings(
            scoring=_recorded(config.scoring_of(env)),
            normalization=msgspec.to_builtins(config.normalization_of(env)),
            reward_config=msgspec.to_builtins(config.reward_config_of(env)),
            advantage=_recorded(config.advantage_of(env)),
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


def _recorded(settings: msgspec.Struct) -> dict[str, Any]:
    """Return settings as a promotion stores them in ROLLOUTS: without secrets, since every reader sees them."""
    plain: dict[str, Any] = masked("", msgspec.to_builtins(settings))
    return {name: value for name, value in plain.items() if name not in _OF_THE_PROCESS}


def config_under_promotion(one: Promotion, config: RunConfig) -> RunConfig:
    """Return `config` with the settings of a promotion; environments that it does not name stay unchanged.

    Its raters are those of the message; check them with `scorer.promoted` before they are loaded. Raises `ConfigError`
    if the two do not fit together, if this build does not know a setting of the promotion, or if it names an estimator
    that `config` does not.
    """
    named = [config.advantage, *(env.advantage for env in config.environments.values() if env.advantage is not None)]
    environments = dict(config.environments)
    for env in environments.keys() & one.environments.keys():
        try:
            environments[env] = _env_settings(environments[env], one.environments[env], named)
        except msgspec.ValidationError as error:  # a newer build's settings, or such as it alone allows
            raise ConfigError(f"revision {one.revision}, environment {env}: {error}; upgrade this service") from error
        except ConfigError as error:
            raise ConfigError(f"revision {one.revision}, environment {env}: {error}") from error
    return msgspec.structs.replace(config, environments=environments)


def _env_settings(
    settings: EnvironmentConfig, judging: RewardSettings, named: Sequence[AdvantageConfig]
) -> EnvironmentConfig:
    return msgspec.structs.replace(
        settings,
        scoring=msgspec.convert(judging.scoring, ScoringConfig),
        normalization=msgspec.convert(judging.normalization, NormalizationConfig),
        reward_config=msgspec.convert(judging.reward_config, RewardConfig),
        advantage=_admitted_advantage(msgspec.convert(judging.advantage, AdvantageConfig), named),
        success_rater=judging.success_rater,
        success_threshold=judging.success_threshold,
    )


def _admitted_advantage(asked: AdvantageConfig, named: Sequence[AdvantageConfig]) -> AdvantageConfig:
    """Return the advantages of a promotion, with an estimator of one's own as `named` has it.

    Raises `ConfigError` where none has it: a message names no code.
    """
    if asked.estimator in ESTIMATORS:
        return asked
    for own in named:
        params = own.own_params
        if code_name(own.estimator) == code_name(asked.estimator) and asked.own_params in (params, masked("", params)):
            return msgspec.structs.replace(asked, estimator=own.estimator, params=own.params)
    promotable = {code_name(path): path for own in named for path in (own.estimator, *own.promotable) if ":" in path}
    path = promotable.get(code_name(asked.estimator))
    if path is None or not all(isinstance(value, bool | int | float) for value in asked.own_params.values()):
        what = "with these parameters " if path else ""
        raise ConfigError(
            f"the estimator {asked.estimator!r} is not named {what}by this service's own configuration, and a "
            "promotion, which is a message, names no code: name it in advantage.promotable and restart scorers, "
            "normalizer and batcher, or promote another revision"
        )
    return msgspec.structs.replace(asked, estimator=path)


async def read_promotions(bus: Bus, run: str, revision: str) -> tuple[list[Promotion], int]:
    """Return the promotions, and the last sequence on their subject, which the next `write` must expect."""
    subject = subjects.promotion(run, revision)
    found, _, last = await read_last_event(bus, ROLLOUTS, subject, Promotions, lambda one: one.run == run)
    return (found.promotions if found else []), last


async def write_promotions(bus: Bus, promotions: Promotions, revision: str, *, expected: int) -> int:
    """Store the list and return its sequence. Raises `FencedError` if another process wrote meanwhile."""
    promotions.check()
    name = subjects.promotion(promotions.run, revision)
    last = promotions.promotions[-1]
    msg_id = commit_id(f"{name}.{expected}.{last.revision}.{last.asked_ns}.{last.first}")
    return await bus.commit(name, encode(promotions), expected=expected, msg_id=msg_id)


class ActivePromotion:
    """Finds a rollout's promotion in the list of a server that also holds the rollout.

    One read serves every caller that came before it began, and every rollout that the server holds. So a backlog needs
    few reads, and a caller waits at most for the read under way and the next one.
    """

    def __init__(self, bus: Bus, run: str, revision: str) -> None:
        self._bus, self._run = bus, run
        self._subject = subjects.promotion(run, revision)
        self._promotions: list[Promotion] = []
        self._lists = 0  # how many were stored when the newest was read
        self._newest = 0  # its sequence
        self._stored_to = 0  # by the requests: a delivered rollout is stored, and so are all below
        self._known_to = -1
        self._looking = anyio.Lock()

    async def promotions_known_at(self, seq: int) -> list[Promotion]:
        """Return all promotions, read from a server that has everything up to `seq`, which is stored.

        Raises `InfrastructureError` while no such server answers.
        """
        self._stored_to = max(self._stored_to, seq)
        if seq > self._known_to:
            async with self._looking:
                if seq > self._known_to:  # a read meanwhile began before this rollout was known to be there
                    await self._poll()
        return self._promotions

    async def promotion_at(self, seq: int) -> Promotion | None:
        """Return the promotion of the rollout at `seq`, which is stored; None: the run's configuration.

        Raises `InfrastructureError` while that is not known.
        """
        if undecided_promotion(await self.promotions_known_at(seq)) is not None:
            await anyio.sleep(_POLL_S)
            await self._look_again()
        return active_promotion(self._promotions, seq)

    async def giving_up_promotion(self, seq: int) -> Promotion | None:
        """Return the promotion that gives up the rollout at `seq`, by the current list.

        The raters of this rollout are unavailable.

        Raises `InfrastructureError` as `promotion_at`.
        """
        await self._look_again()
        return giving_up_promotion(self._promotions, seq)

    async def _look_again(self) -> None:
        async with self._looking:
            await self._poll()
        asked = undecided_promotion(self._promotions)
        if asked is not None:
            raise InfrastructureError(
                f"revision {asked.revision} is being promoted, and the batcher has not said from where on"
            )

    async def _poll(self) -> None:
        needed = self._stored_to
        extent = await self._bus.extent(ROLLOUTS, self._subject)
        if extent.last < needed:
            raise InfrastructureError(
                f"{ROLLOUTS} ends at {extent.last} on a server that lags behind: {needed} is stored"
            )
        if extent.messages != self._lists:
            await self._adopt(extent.messages)
        self._known_to = max(self._known_to, extent.last)

    async def _adopt(self, lists: int) -> None:
        """Take over the newest list of promotions; at least `lists` of them are stored."""
        found, at, newest = 0, 0, Promotions(run=self._run, promotions=[])
        async with self._bus.read(ROLLOUTS, [self._subject], follow=False) as messages:
            async for message in messages:
                found, at = found + 1, message.seq
                newest = await self._list_in(message) or newest
        if found < lists:
            newest_list = await self._bus.last(ROLLOUTS, self._subject)  # if that is damaged, this says so
            if newest_list is not None and newest_list.seq == at:
                found = lists  # an older one is damaged, which the newest replaces
        if found < lists or at < self._newest:
            raise InfrastructureError(f"{self._subject}: {found} lists on a server that lags behind")
        decided = [one for one in newest.promotions if one.first is not None]
        for one in decided[sum(one.first is not None for one in self._promotions) :]:
            log.info(
                "revision %s, promoted by %s, scores rollouts from sequence %d on", one.revision, one.by, one.first
            )
        self._promotions, self._lists, self._newest = newest.promotions, found, at

    async def _list_in(self, message: StoredMessage) -> Promotions | None:
        try:
            left_out = await read_left_out(self._bus)
            return await decode_owned(
                self._bus, Promotions, message, lambda one: one.run == self._run, left_out=left_out
            )
        except VersionError as error:  # rollouts wait for the upgrade
            raise InfrastructureError(str(error)) from error
