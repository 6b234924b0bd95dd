"""Measures how far an optimizer step moves the policy, and limits a step that is too large.

The distance is KL(before || after), nats a token, estimated by the mean of w - 1 - log w with w = after / before over
sampled tokens of the step's own batch (k3, http://joschu.net/blog/kl-approx.html). It is never negative. Measuring it
takes one forward pass over whole rows taken evenly over the batch.

If the distance decides how far a step goes (`on_large_step` is shorten or refuse), these rows have at most
`PROBE_TOKENS` padded tokens. If it only warns, they have a `SMALL_PROBE_PART`th of the batch's tokens, within the
bounds `SMALL_PROBE_TOKENS`: some 2 % of a step's work, every few steps. Shortening halves the step until it is within
the bound, as the line search of TRPO does (arXiv:1502.05477).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lachesis.pipeline.trainer.collectives import ALONE, Ranks
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.loss import LOG_RATIO_LIMIT
from lachesis.pipeline.trainer.packed_batch import PackedBatch

__all__ = [
    "PROBE_TOKENS",
    "StepProbe",
    "StepSize",
    "WeightsBeforeStep",
    "describe_large_step",
    "is_measured",
    "probe_tokens",
    "shorten_step",
]

PROBE_TOKENS = 4096
"""Padded tokens (rows * longest row) that a step is measured on; a single longer row is taken whole."""
SMALL_PROBE_PART = 16
SMALL_PROBE_TOKENS = (256, 1024)
_FIRST_STEPS = 10
"""So many steps of a run are measured, whatever the settings: a rate that is too high shows in them."""
MAX_HALVINGS = 10
"""After so many halvings, a thousandth of the step, what is left of it is not taken at all."""

Logprobs = Callable[[PackedBatch], torch.Tensor]
"""From a batch to the policy's logprobs [B,T] of the tokens under its mask."""


class StepSize(NamedTuple):
    """`kl`: of the step as it was taken, nats a token. `full_kl`: of the whole step. `share`: how much was taken."""

    kl: float
    full_kl: float
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class StepProbe:
    """Some rows of a batch, and the logprobs [B,T] that their tokens had before the step.

    Each rank has rows of its own share, and all get the same distance, so that they decide alike.
    """

    batch: PackedBatch
    logprobs_BT: torch.Tensor
    ranks: Ranks = ALONE

    @classmethod
    def of(
        cls,
        batch: PackedBatch,
        logprobs_BT: torch.Tensor,
        device: torch.device,
        ranks: Ranks = ALONE,
        *,
        tokens: int = PROBE_TOKENS,
        in_one_row: bool = False,
        always: bool = False,
        trees: bool = False,
    ) -> StepProbe:
        """Take rows evenly over the batch, whose tokens under the mask have `logprobs_BT` before the step.

        About `tokens` of all ranks together at most, but at least one row of each. `in_one_row`: the model sees them
        without padding, and so of as many rows as have that many tokens by their mean; `always`, `trees`: see
        `PackedBatch.on`.
        """
        if not batch.sequences:
            return cls(batch.to(device), logprobs_BT.to(device), ranks)
        a_row = -(-int(batch.lengths_B.sum()) // batch.sequences) if in_one_row else batch.tokens_BT.shape[1]
        rows = max(1, tokens // ranks.size // a_row)
        every_b = torch.arange(0, batch.sequences, max(1, -(-batch.sequences // rows)))
        taken = batch.rows(every_b).on(device, in_one_row=in_one_row, always=always, trees=trees)
        before_BT = logprobs_BT[every_b.to(logprobs_BT.device), : taken.tokens_BT.shape[1]]
        return cls(taken, before_BT.to(device), ranks)

    def kl(self, logprobs: Logprobs) -> float:
        """Return how far the policy is from where it was, nats a token."""
        with torch.no_grad():
            after_BT = logprobs(self.batch)
        moved = (after_BT - self.logprobs_BT)[self.batch.mask_BT].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).double()
        total, tokens = self.ranks.sum([float((moved.exp() - 1 - moved).sum()), moved.numel()])
        return total / tokens if tokens else 0.0


def probe_tokens(config: LearnerConfig, *, padded: int) -> int:
    """Return how many padded tokens a step is measured on, of a batch that has `padded`."""
    if config.on_large_step != "warn":
        return PROBE_TOKENS
    fewest, most = SMALL_PROBE_TOKENS
    return max(fewest, min(most, padded // SMALL_PROBE_PART))


def is_measured(config: LearnerConfig, steps: int, last: StepSize | None) -> bool:
    """Return whether the step after `steps` steps is measured; `last`: the last measurement."""
    if config.max_step_kl is None or config.on_large_step != "warn":
        return config.max_step_kl is not None
    was_large = last is not None and not last.kl <= config.max_step_kl
    return was_large or steps < _FIRST_STEPS or steps % config.step_kl_every == 0


class WeightsBeforeStep:
    """The weights before a step, and with `moments` the optimizer's state too."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, moments: bool) -> None:
        self._optimizer = optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.weights = [parameter.detach().clone() for parameter in self.parameters]
        self._state: dict[torch.Tensor, dict[str, Any]] = {}
        if moments:
            self._state = {
                parameter: {name: value.clone() if torch.is_tensor(value) else value for name, value in entry.items()}
                for parameter, entry in optimizer.state.items()
            }

    def restore(self) -> None:
        """Put weights and optimizer back to where they were."""
        with torch.no_grad():
            for parameter, old in zip(self.parameters, self.weights, strict=True):
                parameter.copy_(old)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def shorten_step(
    before: WeightsBeforeStep, probe: StepProbe, logprobs: Logprobs, full_kl: float, max_kl: float
) -> StepSize:
    """Move the weights back until the step, which was of `full_kl`, is within `max_kl`.

    Return what was left of it.
    """
    after = [parameter.detach().clone() for parameter in before.parameters]
    kl, share = full_kl, 1.0
    while not kl <= max_kl:  # a step into NaN is too large as well
        share = share / 2 if share > 0.5**MAX_HALVINGS else 0.0
        with torch.no_grad():
            for parameter, old, new in zip(before.parameters, before.weights, after, strict=True):
                parameter.copy_(torch.lerp(old, new, share) if share else old)
        kl = probe.kl(logprobs) if share else 0.0
    return StepSize(kl, full_kl, share)


def describe_large_step(size: StepSize, config: LearnerConfig, rate: float) -> str | None:
    """Say that a step was too large and which setting to lower; None if it was not."""
    limit = config.max_step_kl
    if limit is None or size.full_kl <= limit:
        return None
    took = {
        "warn": "it was taken",
        "shorten": f"{size.share:.3g} of it was taken",
        "refuse": "it was undone, and its batch is void",
    }[config.on_large_step]
    text = (
        f"the step moved the policy by KL {size.full_kl:.3g} nats a token, over training.learner.max_step_kl = "
        f"{limit:g}; {took}. Lower training.learner.learning_rate, now {rate:.2g}, or raise warmup_steps"
    )
    return text if config.on_large_step != "warn" else f'{text}; on_large_step = "shorten" bounds such steps'
