"""The settings of the teacher stage: all that it takes of a run's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lachesis.pipeline.inference.directory import RoleAccess
from lachesis.pipeline.inference.settings import TokenizerSource
from lachesis.pipeline.teacher.config import TeacherConfig

__all__ = ["TeacherServer", "TeacherSettings"]


class TeacherServer(NamedTuple):
    """The servers of one teacher, and their tokenizer."""

    access: RoleAccess
    tokenizer: TokenizerSource


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSettings:
    """`config`: the section [teacher]. `servers`: by role. `policy_tokenizer`: that of the model that is trained."""

    config: TeacherConfig
    servers: Mapping[str, TeacherServer]
    policy_tokenizer: TokenizerSource
