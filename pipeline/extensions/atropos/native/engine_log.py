"""Finds the training tokens of a group among what the engine sampled for it. Pure.

From prompts, the turns sampled for them, and the sequences that the environment made of these, it derives for each
sequence the engine's logprobs, the policy versions of its tokens, and why it ended. Only this file guarantees that
every trained token was sampled by the engine after exactly the tokens before it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.environment.inference_requests import ModelTurn
from lachesis.pipeline.errors import EnvironmentCodeError
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.inference.sampling_mask import MaskRows
from lachesis.schemas.rollout import FinishReason

__all__ = ["EngineLog", "SampledSequence"]


class SampledSequence(NamedTuple):
    """`logprobs` float32 [T], 0 off the mask; `versions` as in a `Session`; `turns`: sampled parts."""

    logprobs: NDArray[np.float32]
    versions: list[tuple[int, str]]
    finish_reason: FinishReason
    turns: int
    masks: list[tuple[int, MaskRows]]
    """As in a `Session`."""


class _Sampled(NamedTuple):
    tokens: NDArray[np.int32]
    turn: ModelTurn
    asked: SamplingParams


class EngineLog:
    """`run` has the run's sampling parameters: tokens sampled with others are not trained on."""

    def __init__(self, run: SamplingParams) -> None:
        self._temperature = run.temperature
        self._top_p = run.top_p
        self._after: dict[bytes, list[_Sampled]] = {}

    def record(self, prompt_ids: list[int], turn: ModelTurn, asked: SamplingParams) -> None:
        """Record a turn that was sampled after `prompt_ids` with the parameters `asked`."""
        sampled = _Sampled(np.asarray(turn.token_ids, np.int32), turn, asked)
        self._after.setdefault(np.asarray(prompt_ids, np.int32).tobytes(), []).append(sampled)

    def match(self, number: int, tokens: NDArray[np.int32], mask: NDArray[np.bool_]) -> SampledSequence:
        """Return the engine's record of sequence `number`: `tokens` [T], trained on where `mask` [T] is true.

        Raises EnvironmentCodeError, which names the place of a trained token that the engine did not sample there.
        """
        tokens = np.ascontiguousarray(tokens, np.int32)
        logprobs = np.zeros(len(tokens), np.float32)
        versions: list[tuple[int, str]] = []
        masks: list[tuple[int, MaskRows]] = []
        reason: FinishReason = "stop"
        turns = at = 0
        while at < len(tokens):
            if not mask[at]:
                at += 1
                continue
            found, length = self._longest(tokens, mask, at)
            if found is None:
                raise EnvironmentCodeError(self._problem(number, at))
            if found.asked.temperature != self._temperature:
                raise EnvironmentCodeError(
                    f"tokens[{number}][{at}:{at + length}] were sampled at temperature {found.asked.temperature:g}, "
                    f"and the run trains at {self._temperature:g}: let the environment ask for that, or set "
                    "environments.NAME.temperature and training.learner.temperature to its own"
                )
            allowed = found.turn.sampling_mask
            if found.asked.top_p not in (1, self._top_p) and allowed is None:
                raise EnvironmentCodeError(
                    f"tokens[{number}][{at}:{at + length}] were sampled with top_p {found.asked.top_p:g}, and the run "
                    'trains on all tokens: let the environment leave it out, or name { input = "sampling_mask" } in '
                    "training.inputs"
                )
            if allowed is not None:
                masks.append((at, allowed[:length]))
            logprobs[at : at + length] = found.turn.logprobs[:length]
            for start, version in found.turn.versions:
                if start < length and (not versions or versions[-1][1] != version):
                    versions.append((at + start if versions else 0, version))
            whole = length == len(found.tokens)
            reason = "length" if found.turn.finish_reason == "length" or not whole else "stop"
            turns += 1
            at += length
        return SampledSequence(logprobs, versions, reason, turns, masks)

    def _longest(self, tokens: NDArray[np.int32], mask: NDArray[np.bool_], at: int) -> tuple[_Sampled | None, int]:
        """Return the turn sampled after `tokens[:at]` with the most tokens in common from there on, and how many."""
        best: tuple[_Sampled | None, int] = (None, 0)
        for sampled in self._after.get(tokens[:at].tobytes(), []):
            room = min(len(sampled.tokens), len(tokens) - at)
            same = (tokens[at : at + room] == sampled.tokens[:room]) & mask[at : at + room]
            length = room if same.all() else int(np.argmin(same))
            if length > best[1]:
                best = sampled, length
        return best

    def _problem(self, number: int, at: int) -> str:
        return (
            f"tokens[{number}][{at}] is trained on (masks[{number}][{at}] is not -100), but the run's policy did not "
            "sample it after the tokens before it. Take tokens, masks and logprobs from self.server.managed_server(), "
            "and do not tokenize what was generated again"
        )
