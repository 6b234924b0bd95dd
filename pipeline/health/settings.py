"""The settings of the health service: all that it takes of a run's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.check import RunSettings
from lachesis.pipeline.ledger.audit import LedgerRules

__all__ = ["EnvHealthSettings", "HealthSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvHealthSettings:
    """What the checks of one environment need. `evaluations`: names of those that are checked with it."""

    run: RunSettings
    evaluations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """`config`: the section [health]. `trainer`: name of the trainer whose ledger and reports are read. `rules`: of the
    ledger, without the time from which they hold.
    """

    config: HealthConfig
    trainer: str
    environments: Mapping[str, EnvHealthSettings]
    rules: LedgerRules
