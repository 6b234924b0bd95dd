"""Configuration of the learning side. Values are validated on construction; the defaults are those of the demo."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lachesis.schemas.errors import ConfigError

__all__ = ["LearnerConfig", "LossConfig", "WarmStartConfig"]

Positive = Annotated[float, Meta(gt=0)]
PositiveInt = Annotated[int, Meta(gt=0)]


class LossConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy-gradient loss."""

    clip_low: Positive = 0.2
    """Lower clip distance of the importance ratio: it is clipped at 1 - clip_low. Default 0.2."""
    clip_high: Positive = 0.28
    """Upper clip distance (clip-higher, DAPO): the ratio is clipped at 1 + clip_high. Default 0.28."""
    dual_clip: Positive | None = 3.0
    """For negative advantages the surrogate is at least dual_clip * advantage. Above 1; None: off. Default 3."""
    anchor: Literal["rollout", "proximal"] = "rollout"
    """What the ratio is taken against. rollout: the logprobs the rollout was sampled with. proximal: the trainer's own
    policy at the start of the step, the rollout's distance being corrected by `tis_cap` (decoupled loss)."""
    tis_cap: Positive | None = 2.0
    """Truncated importance sampling, with anchor "proximal" only: each token's loss is weighted by
    min(pi_train / pi_rollout, tis_cap). None turns the weight off. Default 2."""
    aggregation: Literal["token_mean", "constant_length"] = "token_mean"
    """token_mean: sum over trainable tokens / their number (DAPO). constant_length: / (sequences * constant_length)
    (Dr.GRPO, no length bias)."""
    constant_length: PositiveInt = 16
    """Tokens each sequence counts as under aggregation "constant_length". Default 16."""
    teacher_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the teacher term: the advantage loses teacher_coef * (logprob_train - logprob_teacher) at each token,
    in advantage per nat. Default 0 (off)."""

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip is {self.dual_clip}; it must be greater than 1, or None to turn it off.")
        if self.clip_low >= 1:
            raise ConfigError(f"clip_low is {self.clip_low}; it must be below 1, the ratio cannot fall below 0.")


class LearnerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer step."""

    learning_rate: Positive = 3e-4
    """AdamW step size, constant. Default 3e-4; 1e-3 destroys the demo's model."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment. Default 0.9."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment. Default 0.95."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Decoupled weight decay. Default 0."""
    grad_clip: Positive = 1.0
    """Largest L2 norm of the gradient of the whole batch. Default 1."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Padded tokens (rows * longest row) of one forward and backward pass. Bounds memory, changes no result beyond
    rounding. A single longer sequence makes a micro-batch of its own. Default 16384."""
    temperature: Positive = 1.0
    """Sampling temperature of the rollouts: logits are divided by it, so that the ratio compares like with like.
    Default 1."""
    loss: LossConfig = LossConfig()
    """The policy-gradient loss."""


class WarmStartConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The supervised warm start of a fresh model."""

    steps: PositiveInt = 220
    """Optimizer steps. Default 220."""
    batch_size: PositiveInt = 64
    """Pairs drawn with replacement for each step. Default 64."""
    learning_rate: Positive = 3e-3
    """Peak AdamW step size. Default 3e-3."""
    slips: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of the answers in which two neighbouring characters are exchanged. Demonstrations with slips leave the
    policy unsure between the right answer and a near miss, as a base model is: format and task are known, and what the
    reward adds can be seen. 0 keeps all answers as they are. Default 0.5."""
    seed: int = 0
    """Seed of the slips and of the order of the pairs. Default 0."""
