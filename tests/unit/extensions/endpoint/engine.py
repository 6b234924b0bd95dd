"""An engine of the tests' own over a real tokenizer and template. It remembers all that it has sampled.

Its answers are a script's texts in spellings that the tokenizer itself would not choose.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import anyio.lowlevel
import numpy as np
from unit.extensions.endpoint.families import tokenizer_of

from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.protocol import SamplingParams, WeightVersionSpan
from lachesis.pipeline.inference.serving.dialects import template_messages
from lachesis.pipeline.model.chat_template import render_chat

VERSION = "0-fake-0000"


class Sampled(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class ScriptedEngine:
    """Answers with `texts` in order, then with "done"."""

    def __init__(self, family: str, seed: int = 0) -> None:
        self.tokenizer = tokenizer_of(family)
        self.texts: list[str] = []
        self.sampled: list[Sampled] = []
        self._random = random.Random(seed)

    async def tokenize(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        chat = template_messages(list(messages))
        return render_chat(self.tokenizer, chat, tools=tools, add_generation_prompt=add_generation_prompt)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids))

    async def generate(
        self, prompt_ids: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        await anyio.lowlevel.checkpoint()
        return [self._answer(list(prompt_ids), sampling or SamplingParams()) for _ in range(n)]

    def _answer(self, prompt: list[int], sampling: SamplingParams) -> GeneratedSample:
        text = self.texts.pop(0) if self.texts else "done"
        ids = [*self._spelled(text), self.tokenizer.eos_token_id]
        cut = sampling.max_tokens is not None and len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens] if cut else ids
        logprobs = [float(np.float32(-self._random.random())) for _ in ids]
        self.sampled.append(Sampled(prompt, ids, logprobs))
        return GeneratedSample(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason="length" if cut else "stop",
            weight_versions=[WeightVersionSpan(version=VERSION, start=0, end=len(ids))],
        )

    def _spelled(self, text: str) -> list[int]:
        """Return a text's tokens, encoded in pieces that are cut at random places outside of special tokens."""
        whole = self.tokenizer.encode(text, add_special_tokens=False)
        special = set(self.tokenizer.all_special_ids)
        found: list[int] = []
        for token in whole:
            piece = self.tokenizer.decode([token])
            if token in special or len(piece) < 2 or not piece.isascii():
                found.append(token)
                continue
            cut = self._random.randint(1, len(piece) - 1)
            parts = (piece[:cut], piece[cut:]) if self._random.random() < 0.5 else (piece,)
            found += [one for part in parts for one in self.tokenizer.encode(part, add_special_tokens=False)]
        return found
