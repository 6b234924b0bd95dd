"""The reference server's engine behind `/generate`."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from starlette.requests import Request

from lachesis.pipeline.inference.protocol import PromptLogprobs, SamplingParams, TokenizeRequest
from lachesis.pipeline.inference.serving.engine import SamplingEngine
from lachesis.pipeline.inference.serving.generate_route import TextSample
from lachesis.pipeline.inference.serving.replies import generated
from lachesis.pipeline.inference.serving.text import SampleTexts
from lachesis.pipeline.inference.serving.text_tokenizer import Encode

__all__ = ["EngineBackend"]


class EngineBackend:
    """A `GenerateBackend` for one request. A client that hangs up ends the work."""

    def __init__(
        self,
        request: Request,
        engine: SamplingEngine,
        tokenizer: Any,
        encode: Encode,
        end_tokens: Container[int] = (),
    ) -> None:
        self._request = request
        self._engine = engine
        self._tokenizer = tokenizer
        self._encode = encode
        self._end_tokens = end_tokens

    async def tokenize(self, text: str) -> list[int]:
        """See `GenerateBackend`."""
        return await self._encode(TokenizeRequest(prompt=text))

    async def detokenize(self, tokens: list[int]) -> str:
        """See `GenerateBackend`."""
        text: str = self._tokenizer.decode(tokens)
        return text

    async def sample(self, prompt: list[int], params: SamplingParams) -> tuple[list[TextSample], PromptLogprobs | None]:
        """See `GenerateBackend`."""
        texts = SampleTexts.of(self._tokenizer, self._end_tokens, skip_special_tokens=params.skip_special_tokens)
        (result,) = await generated(self._request, self._engine, [prompt], params)
        samples = [
            TextSample(
                token_ids=sample.token_ids,
                logprobs=sample.logprobs,
                top_logprobs=sample.top_logprobs,
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
                text=texts.text(sample.token_ids, sample.finish_reason, sample.stop_reason),
                weight_version=sample.weight_versions[-1].version if sample.weight_versions else None,
            )
            for sample in result.samples
        ]
        return samples, result.prompt_logprobs
