"""The settings of the curriculum: all that it takes of a run's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.tasks.held_out import HeldOutRule

__all__ = ["CurriculumEnv", "CurriculumSettings"]


class CurriculumEnv(NamedTuple):
    """An environment: `kind` and `params` make it, unless it `is_foreign`. `held_out`: which tasks are not drawn."""

    kind: str
    params: Mapping[str, Any]
    is_foreign: bool = False
    held_out: HeldOutRule = HeldOutRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSettings:
    """`config`: the section [curriculum]. `trainer`: name of the trainer whose ledger is read."""

    config: CurriculumConfig
    trainer: str
    environments: Mapping[str, CurriculumEnv]
