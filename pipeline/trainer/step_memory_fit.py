"""Decides how a step is divided after memory ran out. Pure.

Micro-batches get smaller, down to one sequence; then layers are computed again in the backward pass. If micro-batches
had to get smaller only because the device had no memory left between its passes, they grow again after some steps with
room, each time later.

Guarantees that ranks with the same wishes decide alike, and that there are finitely many attempts: each has fewer
tokens in a micro-batch than the one that failed, or is the first that computes layers again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from lachesis.pipeline.errors import OutOfMemoryError

__all__ = ["CALM_STEPS", "MAX_CALM_STEPS", "FailedPass", "FitWish", "StepFit", "describe_fit"]

CALM_STEPS, MAX_CALM_STEPS = 20, 640
"""Steps with memory left after which micro-batches grow: twice as many each time, and never after the second number."""


class FailedPass(msgspec.Struct, frozen=True, kw_only=True):
    """The micro-batch that ran out of memory, and the text of the error."""

    rows: int
    tokens: int
    """Padded."""
    shortage: str


class FitWish(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wishes for the next attempt; all defaults: its passes succeeded."""

    tokens: int | None = None
    """Most padded tokens of a micro-batch."""
    recompute: bool = False
    """Layers are to be computed again."""
    hopeless: str | None = None
    """Why nothing helps: one sequence alone does not fit."""
    is_tight: bool = False
    """The passes went well, but the device had no memory left between them, which takes time."""

    @property
    def is_content(self) -> bool:
        """Whether no other attempt is needed."""
        return self == FitWish(is_tight=self.is_tight)


class StepFit(msgspec.Struct, frozen=True, kw_only=True):
    """How a step is divided: at most `tokens` padded tokens in a micro-batch, `recomputes` layers or not.

    `configured` are the tokens that the setting allows, `may_recompute` says whether the setting leaves the choice.
    """

    configured: int
    tokens: int
    recomputes: bool
    may_recompute: bool
    most: int | None = None
    """Tokens beyond which passes ran out of memory; None: they never did."""
    calm_steps: int = 0
    """Steps since the last change, all with memory left."""
    wait_steps: int = CALM_STEPS
    """Calm steps after which a micro-batch gets larger."""

    @classmethod
    def of(cls, tokens: int, recompute: bool | Literal["auto"], *, can_recompute: bool) -> StepFit:
        """Return a learner's first division."""
        return cls(
            configured=tokens,
            tokens=tokens,
            recomputes=recompute is True,
            may_recompute=recompute == "auto" and can_recompute,
        )

    def beginning_with(self, tokens: int, device: str) -> StepFit:
        """Return it with at most so many tokens, which an earlier life of the trainer found to fit.

        They grow again on a GPU (`device`), where it may have been for lack of room alone; on a CPU memory ran out.
        """
        found = min(self.tokens, tokens)
        return msgspec.structs.replace(self, tokens=found, most=found if device == "cpu" else None)

    def wish_after(self, failed: FailedPass | None, help_text: str) -> FitWish:
        """Return the wish of a rank after its passes failed or succeeded.

        `help_text`: the settings that save memory.
        """
        if failed is None:
            return FitWish()
        if failed.rows > 1:
            return FitWish(tokens=min(self.tokens, failed.tokens) // 2)
        if self.may_recompute and not self.recomputes:
            return FitWish(recompute=True)
        return FitWish(
            hopeless=f"one sequence of {failed.tokens:,} tokens alone does not fit into memory: {failed.shortage}. "
            f"What helps: {help_text}"
        )

    def after(self, wishes: Sequence[FitWish]) -> StepFit:
        """Return the next attempt, which all ranks make alike.

        Raises `OutOfMemoryError` where a rank has no hope.
        """
        for wish in wishes:
            if wish.hopeless is not None:
                raise OutOfMemoryError(wish.hopeless)
        if any(wish.recompute for wish in wishes):
            return msgspec.structs.replace(self, tokens=self.configured, recomputes=True, most=None, calm_steps=0)
        fewer = min(wish.tokens for wish in wishes if wish.tokens is not None)
        return msgspec.structs.replace(self, tokens=fewer, most=fewer, calm_steps=0)

    def after_step(self, wishes: Sequence[FitWish], longest: int, *, may_grow: bool = True) -> StepFit:
        """Return how the next step is divided, given what the ranks wish after one whose passes went well.

        `longest`: tokens of the longest sequence of all ranks, which have to fit into a micro-batch. `may_grow`: not
        where a pass that runs out of memory cannot be begun again.
        """
        half = self.tokens // 2
        if any(wish.is_tight for wish in wishes):
            if longest > half:
                return msgspec.structs.replace(self, calm_steps=0)
            return msgspec.structs.replace(self, tokens=half, calm_steps=0)
        largest = self.configured if self.most is None else min(self.configured, self.most)
        if not may_grow or self.tokens >= largest or self.wait_steps > MAX_CALM_STEPS:
            return self
        calm = self.calm_steps + 1
        if calm < self.wait_steps:
            return msgspec.structs.replace(self, calm_steps=calm)
        grown = min(largest, 2 * self.tokens)
        return msgspec.structs.replace(self, tokens=grown, calm_steps=0, wait_steps=2 * self.wait_steps)


def describe_fit(fit: StepFit, configured_recompute: bool | Literal["auto"]) -> str | None:
    """Say how steps are divided because memory ran out, and what to set; None where it did not."""
    parts, settings = [], []
    if fit.tokens < fit.configured:
        parts.append(f"micro-batches have at most {fit.tokens:,} tokens instead of {fit.configured:,}")
        settings.append(f"training.learner.max_tokens_per_microbatch = {fit.tokens}")
    if fit.recomputes and configured_recompute is not True:
        parts.append("layers are computed again in the backward pass")
        settings.append("training.learner.recompute_layers = true")
    if not parts:
        return None
    return f"memory ran out in a step, so {' and '.join(parts)}; {' and '.join(settings)} begins so"
