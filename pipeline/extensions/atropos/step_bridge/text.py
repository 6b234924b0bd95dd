"""Converts text of steps: text as an action, and observations without the chat template.

The template is learned from a few messages that `tokenize` renders, so any engine's works. Guarantees that the tokens
of a sample that travels with its text (`SampledText`) are the engine's own, and that tokens made from a text have no
logprobs (NaN), so that they cannot be trained on by mistake.
"""

import math
import random
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from lachesis.pipeline.common.number_arguments import whole_number
from lachesis.pipeline.common.real_number import real_number
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.extensions.atropos.step_bridge.injected import Detokenize, Tokenize
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.protocol import WeightVersionSpan
from lachesis.schemas.errors import DataError

__all__ = ["Action", "ChatTemplate", "SampledText", "random_action", "register_with_gem"]

_FIRST, _SECOND, _THIRD, _FOURTH = "qxqone", "second qxw", "third qxz", "fourth qxy"
"""Texts that stand in no chat template, and of which no two begin or end alike."""
_MIN_MARK_CHARS = 3
"""Characters, without blanks, from which on a part of the template is looked for within a text."""
_MAX_RANDOM_NUMBER = 100


class SampledText(str):
    """The text of a sample, which has the sample with it as `sample`: an action for loops and wrappers that know text.

    It is an ordinary `str`; whatever makes another text of it (`strip`, `+`) loses the sample.
    """

    sample: GeneratedSample

    def __new__(cls, sample: GeneratedSample) -> Self:
        text = super().__new__(cls, sample.text)
        text.sample = sample
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return SampledText, (self.sample,)


Action = GeneratedSample | str
"""A sample, a `SampledText`, or plain text, whose tokens are made by the engine's chat template."""


class ChatTemplate:
    """What the engine's chat template writes around messages. It is learned once, when it is first needed."""

    def __init__(self, tokenize: Tokenize, detokenize: Detokenize | None = None) -> None:
        self._tokenize = tokenize
        self._detokenize = detokenize
        self._answer: _AnswerTokens | None = None
        self._marks: _Marks | None = None

    async def sample(self, action: Action) -> GeneratedSample:
        """Return the sample of an action.

        Raises `DataError` where it is no whole one, or a text that cannot be one.
        """
        if isinstance(action, SampledText):
            action = action.sample
        if isinstance(action, str):
            return await self._sample_of_text(action)
        if not isinstance(action, GeneratedSample) or action.finish_reason not in {"stop", "length"}:
            raise DataError(
                "an action is a text, a SampledText, or a whole GeneratedSample (token ids, logprobs, text) that was "
                "not aborted"
            )
        return _with_arrays(action)

    async def first_observation(self, prompt: str) -> str:
        """Return the texts of a prompt's messages, without what the template writes around them."""
        return (await self._learned()).texts_of_prompt(prompt)

    async def next_observation(self, new: str, action_ids: Sequence[int]) -> str:
        """Return the texts of what follows an action in the next prompt, without the template."""
        assert self._detokenize is not None  # noqa: S101 - who asks for observations has given one
        said = await self._detokenize(action_ids)
        return (await self._learned()).texts_after(new, said)

    async def _sample_of_text(self, text: str) -> GeneratedSample:
        if self._answer is None:
            self._answer = _AnswerTokens.between(await self._closed(_SECOND), await self._closed(_FIRST))
        ids = self._answer.of(await self._closed(text))
        if ids is None:
            raise DataError(
                f"the engine's chat template does not write the answer {text!r:.80} as one: give the sample itself, or "
                "SampledText(sample)"
            )
        return GeneratedSample(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), math.nan, np.float32),
            text=str(text),
            finish_reason="stop",
            weight_versions=[WeightVersionSpan(version="0-text-0", start=0, end=len(ids))],
        )

    async def _closed(self, text: str) -> list[int]:
        """Return the tokens of a conversation that ends with an answer."""
        return await self._tokenize(_chat(("user", _FIRST), ("assistant", text)), add_generation_prompt=False)

    async def _learned(self) -> "_Marks":
        if self._marks is None:
            alone = await self._written(("user", _FIRST))
            talk = ("user", _FIRST), ("assistant", _SECOND)
            follow = {"user": await self._written(*talk, ("user", _THIRD))}
            for role in ("tool", "system"):
                follow[role] = await self._written_if_possible(*talk, (role, _THIRD))
            instructed = await self._written_if_possible(("system", _FOURTH), ("user", _FIRST))
            self._marks = _Marks.found_in(alone, instructed, list(follow.values()))
        return self._marks

    async def _written_if_possible(self, *messages: tuple[str, str]) -> str:
        """Return the text of messages, "" if the template has no place for a role. Raises `InfrastructureError`."""
        try:
            return await self._written(*messages)
        except InfrastructureError:
            raise  # it says nothing about the template, which is learned once
        except Exception:  # noqa: BLE001 - templates refuse a role by any error
            return ""

    async def _written(self, *messages: tuple[str, str]) -> str:
        assert self._detokenize is not None  # noqa: S101 - as above
        return await self._detokenize(await self._tokenize(_chat(*messages), add_generation_prompt=True))


def _with_arrays(sample: GeneratedSample) -> GeneratedSample:
    """Return a sample whose ids and logprobs are arrays, also where an engine gave lists.

    Raises `DataError` where they are no such rows, or of different lengths.
    """
    try:
        ids = np.asarray([whole_number("a token id", one) for one in sample.token_ids], np.int32)
        logprobs = np.asarray([real_number(one) for one in sample.logprobs], np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"the sample of an action has no rows of token ids and logprobs: {error}") from error
    if len(ids) != len(logprobs):
        raise DataError(
            f"the sample of an action has {len(ids)} token ids and {len(logprobs)} logprobs; give a logprob for each, "
            "that of the stop token included"
        )
    return msgspec.structs.replace(sample, token_ids=ids, logprobs=logprobs)


class _AnswerTokens(NamedTuple):
    """The tokens before and after an answer; the first of those after it ends it."""

    before: list[int]
    after: list[int]

    @classmethod
    def between(cls, one: list[int], other: list[int]) -> "_AnswerTokens":
        """Return what two conversations have in common that differ in their last answer alone."""
        before = _common(one, other)
        after = _common(one[before:][::-1], other[before:][::-1])
        return cls(one[:before], one[len(one) - after :])

    def of(self, ids: list[int]) -> list[int] | None:
        """Return the tokens of the answer in a conversation, with the one that ends it; None: there is none."""
        start, end = len(self.before), len(ids) - len(self.after)
        if end < start or ids[:start] != self.before or ids[end:] != self.after:
            return None
        return ids[start : end + min(1, len(self.after))]


class _Marks(NamedTuple):
    """What a template writes: before the first message, between two, and at the end for the model to go on."""

    openings: list[str]
    within: list[str]
    follow: list[str]
    """After an answer, before the next message; what ends the answer included."""
    end: str

    @classmethod
    def found_in(cls, alone: str, instructed: str, follow: list[str]) -> "_Marks":
        opening, _, end = alone.partition(_FIRST)
        system, _, rest = instructed.partition(_FOURTH)
        between = [rest.partition(_FIRST)[0]] if _FIRST in rest else []
        after = []
        for text in follow:
            answered, _, later = text.partition(_SECOND)
            if _THIRD in later:
                between.append(answered.partition(_FIRST)[2])
                after.append(later.partition(_THIRD)[0])
        openings = [opening, system if _FOURTH in instructed else ""] if _FIRST in alone else []
        return cls(
            openings=_longest_first(openings),
            within=[mark for mark in _longest_first([*between, *after]) if len(mark.strip()) >= _MIN_MARK_CHARS],
            follow=_longest_first(after),
            end=end if _FIRST in alone else "",
        )

    def texts_of_prompt(self, prompt: str) -> str:
        opening = next((mark for mark in self.openings if prompt.startswith(mark)), "")
        return self._texts(prompt.removeprefix(opening))

    def texts_after(self, new: str, said: str) -> str:
        """Return the texts of `new`. The answer `said` may have begun what the template writes after an answer."""
        for mark in self.follow:
            for at in range(len(mark), -1, -1):
                if said.endswith(mark[:at]) and new.startswith(mark[at:]):
                    return self._texts(new[len(mark) - at :])
        return self._texts(new)

    def _texts(self, text: str) -> str:
        text = text.removesuffix(self.end)
        if not self.within:
            return text
        parts = re.split("|".join(map(re.escape, self.within)), text)
        return "\n".join(part for part in parts if part)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two rows begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _longest_first(marks: Sequence[str]) -> list[str]:
    return sorted({mark for mark in marks if mark}, key=lambda mark: (-len(mark), mark))


def _chat(*messages: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


def random_action(observation: str, draw: random.Random) -> str:
    """Return a word of an observation, or a number where it has none: any text is an action."""
    words = observation.split()
    return draw.choice(words) if words else str(draw.randrange(_MAX_RANDOM_NUMBER))


def register_with_gem(cls: type[Any]) -> None:
    """Let `isinstance(env, gem.Env)` be true of a class, if the program has imported gem."""
    env = getattr(sys.modules.get("gem.core"), "Env", None)
    if env is not None and hasattr(env, "register"):
        env.register(cls)
