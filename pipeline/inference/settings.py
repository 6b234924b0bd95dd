"""The settings of an inference server: all that it takes of a run's configuration."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.inference.directory import RoleAccess

__all__ = ["ServerSettings", "TokenizerSource"]


class TokenizerSource(NamedTuple):
    """`name`: folder or id that a tokenizer is loaded from, None: not set. `chat_template`: its own by default."""

    name: str | None = None
    chat_template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The server of one role. `config`: the section [inference.ROLE]. `access`: how clients reach it.

    `folder`: the run's. `trainer`: name of the trainer whose policy is followed. `model`: a folder or an id, None: not
    set.
    """

    role: str
    config: InferenceConfig
    access: RoleAccess
    folder: Path
    trainer: str
    model: str | None
    own_tokenizer: str | None = None
    """The tokenizer that it is to have in place of the one beside its weights; None: that one."""
    tokenizer: str | None = None
    """The folder or id that its tokenizer is loaded from; None: the model's."""
    chat_template: str | None = None
    """The chat template that it is to have; None: the one beside its tokenizer."""
    model_exceptions: Sequence[str] = ()
    """What may be wrong with the model: see `model_exceptions` of a run."""
    shares_weights: bool = False
    """Whether the trainer's weights are in shared memory."""
    max_staleness: int = 0
    """Optimizer steps by which its policy may be older than the newest one."""
    expected_temperature: float | None = None
    """The temperature at which the trainer expects environments of other projects to sample; None: there are none."""
    routed_experts: bool = False
    """Whether vLLM records the experts of each token."""
