"""Holds the tokens of one training sequence while they are generated."""

from collections.abc import Container, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.environment.inference_requests import ModelTurn, joined_experts
from lachesis.pipeline.inference.sampling_mask import MaskRows
from lachesis.schemas.rollout import FinishReason

__all__ = ["SequenceDraft", "trained_calls"]


class SequenceDraft:
    """Tokens, loss mask, logprobs and version spans so far, one entry a token.

    Guarantees that the mask is true exactly on tokens that the model generated (its stop tokens included) and that are
    trained in this sequence, and that a logprob off the mask is 0.
    """

    def __init__(self) -> None:
        self.finish_reason: FinishReason = "stop"
        self.tokens: list[int] = []
        self.loss_mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[tuple[int, str]] = []
        self.routed_experts: NDArray[np.int16] | None = None
        self.sampling_masks: list[tuple[int, MaskRows]] = []
        self.turns: list[int] = []
        """The calls that are trained in this sequence, in the order in which their tokens lie."""
        self.spans: list[slice] = []
        """Where the tokens of each of `turns` lie."""

    def copied_to(self, other: "SequenceDraft") -> None:
        """Let another, empty draft begin with all that this one holds."""
        other.finish_reason = self.finish_reason
        other.tokens, other.loss_mask, other.logprobs = list(self.tokens), list(self.loss_mask), list(self.logprobs)
        other.versions, other.routed_experts = list(self.versions), self.routed_experts
        other.sampling_masks, other.turns, other.spans = list(self.sampling_masks), list(self.turns), list(self.spans)

    def without(self, calls: Container[int]) -> "SequenceDraft":
        """Return the draft with `calls` off its loss mask: another sequence of the sample trains them."""
        found = SequenceDraft()
        self.copied_to(found)
        untrained = [span for call, span in zip(self.turns, self.spans, strict=True) if call in calls]
        for span in untrained:
            length = span.stop - span.start
            found.loss_mask[span], found.logprobs[span] = [False] * length, [0.0] * length
        starts = {span.start for span in untrained}
        found.sampling_masks = [(start, rows) for start, rows in self.sampling_masks if start not in starts]
        found.spans = [span for span in self.spans if span.start not in starts]
        found.turns = [call for call in self.turns if call not in calls]
        return found

    def put(self, ids: Sequence[int]) -> None:
        """Append tokens that the model did not generate."""
        self.tokens += ids
        self.loss_mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def append(self, turn: ModelTurn, *, trained: bool = True, call: int | None = None) -> None:
        """Append what the model generated. `trained`: False if another sequence of the sample trains it.

        A constrained turn is not trained. `call`: the number of its call in the session, in the order of time; None:
        the next one.
        """
        start, trained = len(self.tokens), trained and not turn.is_constrained
        if trained:
            self.turns.append(len(self.turns) if call is None else call)
            self.spans.append(slice(start, start + len(turn.token_ids)))
        for position, version in turn.versions:
            if not self.versions:
                self.versions.append((0, version))  # the prompt counts with the first generated token
            elif self.versions[-1][1] != version:
                self.versions.append((start + position, version))
        self.tokens += turn.token_ids
        self.loss_mask += [trained] * len(turn.token_ids)
        self.logprobs += turn.logprobs if trained else [0.0] * len(turn.token_ids)
        self.routed_experts = joined_experts(self.routed_experts, turn.routed_experts)
        if trained and turn.sampling_mask is not None:
            self.sampling_masks.append((start, turn.sampling_mask))
        self.finish_reason = "length" if turn.finish_reason == "length" else "stop"


def trained_calls(paths: Sequence[Iterable[int]]) -> list[set[int]]:
    """Return for each sequence of a sample, given as the calls that it consists of, those that it trains.

    Each call is trained in exactly one sequence, the last one that has it.
    """
    known: set[int] = set()
    found = []
    for path in reversed(paths):
        own = set(path) - known
        known |= own
        found.append(own)
    return found[::-1]
