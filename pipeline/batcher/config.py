"""Configuration of batch formation and the ledger. The defaults are those of the demo."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lachesis.pipeline.common.field_types import check_field_types
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.ledger import GroupRef
from lachesis.schemas.planning_header import Plan

__all__ = ["BatchingConfig"]

PositiveInt = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class BatchingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of a batch, and the groups that may be in it."""

    batch_size: PositiveInt = 128
    """Samples in a batch, however many sequences each is trained on; groups are never split. A batch has fewer, by less
    than a group, only if it would otherwise leave out a group that no later batch may have. Default 128."""
    token_budget: PositiveInt | None = None
    """Maximum number of tokens in a batch, prompts included. Default None: no bound."""
    max_staleness: Annotated[int, Meta(ge=0)] = 2
    """Maximum number of optimizer steps between the policy that made a group, see staleness_of, and the step that
    trains it. Older groups are dropped. Default 2."""
    staleness_of: Literal["newest", "oldest"] = "newest"
    """Which policy of a group max_staleness counts from, if weights arrived while it was generated. newest: the one
    that sampled its last tokens, so that a group which takes long is trained as often as others; its older tokens count
    by their importance ratios (training.learner.loss), which may be clipped. oldest: no older token is ever trained,
    and groups that take longer than max_staleness steps are all dropped. Default newest."""
    teacher: Literal["off", "optional", "required"] = "off"
    """off: do not wait for the teacher's logprobs. optional: wait until `teacher_deadline_s`, then train the group
    without them. required: a group without them is unscorable. Default off."""
    teacher_deadline_s: Seconds | None = 60.0
    """Seconds after the batcher first saw a rollout, after which the teacher's logprobs count as missing. A batcher
    that starts again counts from zero. It uses no clock that can be set. None: never. Default 60."""
    score_deadline_s: Seconds | None = None
    """Seconds, counted in the same way, after which an unscored group is given up as dead. Default None: an outage of
    the raters stalls the run instead of costing rollouts."""
    lost_deadline_s: Seconds = 300.0
    """Seconds after annotations of an environment were found unreadable (they have a dead letter), after which its
    rollouts that still lack annotations are given up: an unreadable annotation does not say which rollout it was for,
    and no rollout may wait for ever. Counted in the same way; it must be longer than raters and teacher take. Default
    300."""
    mix: dict[str, float] = {}
    """Weight of each environment in a batch, relative; one not named weighs 1. A silent environment's share goes to the
    others. Default empty: the oldest groups first, wherever they come from."""

    def __post_init__(self) -> None:
        check_field_types(self)
        for env, weight in self.mix.items():
            if not 0 < weight < float("inf"):
                raise ConfigError(f"batching.mix.{env} is {weight}; a weight must be positive and finite.")

    def step_of(self, group: Plan | GroupRef) -> int:
        """Return the policy step from which the staleness of a group counts."""
        return group.last_step if self.staleness_of == "newest" else group.policy_step
