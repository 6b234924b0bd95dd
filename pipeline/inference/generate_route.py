"""`POST /generate`: what clients of vLLM's API server and of SGLang sample by.

A request that has `input_ids`, `text` or `sampling_params` is SGLang's; one that has `prompt` is vLLM's. Of each sample
come the token ids and logprobs as they were sampled.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request

from lachesis.pipeline.inference.dialects import PromptTokens, SglangRequest, VllmRequest
from lachesis.pipeline.inference.engine import Engine
from lachesis.pipeline.inference.protocol import TokenizeRequest
from lachesis.pipeline.inference.replies import body_of, generated
from lachesis.pipeline.inference.requests import SampleResult
from lachesis.pipeline.inference.text import text_of
from lachesis.schemas.errors import DataError
from lachesis.schemas.values import shaped

__all__ = ["GenerateRoute"]

Encode = Callable[[TokenizeRequest], Awaitable[list[int]]]
_OF_SGLANG = {"input_ids", "text", "sampling_params"}


class GenerateRoute:
    """The route's handler."""

    def __init__(self, engine: Engine, tokenizer: Any, encode: Encode) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._encode = encode

    async def generate(self, request: Request) -> Any:
        """Answer POST /generate."""
        given = await body_of(request, dict[str, Any])
        if given.get("stream"):
            raise DataError("stream is not served here; leave it out, or use /v1/completions.")
        if _OF_SGLANG & given.keys():
            return await self._sglang(request, shaped("the request", SglangRequest, given))
        return await self._vllm(request, shaped("the request", VllmRequest, given))

    async def _vllm(self, request: Request, body: VllmRequest) -> dict[str, Any]:
        params = body.params
        prompt = await self._tokens(body.prompt)
        (result,) = await generated(request, self._engine, [prompt], params)
        samples = result.samples
        answer: dict[str, Any] = {
            "text": [self._text(sample, body.skip_special_tokens) for sample in samples],
            "prompt": body.prompt if isinstance(body.prompt, str) else self._tokenizer.decode(prompt),
            "finish_reasons": [sample.finish_reason for sample in samples],
            "prompt_token_ids": prompt,
            "token_ids": [sample.token_ids for sample in samples],
        }
        if params.logprobs is not None:
            answer["logprobs"] = [[[entry] for entry in _entries(sample)] for sample in samples]
        if result.prompt_logprobs is not None:
            answer["prompt_logprobs"] = [
                None if position is None else {token: one.logprob for token, one in position.items()}
                for position in result.prompt_logprobs
            ]
        return answer

    async def _sglang(self, request: Request, body: SglangRequest) -> Any:
        params = body.params
        prompt = body.input_ids if body.text is None else await self._tokens(body.text)
        assert prompt is not None  # noqa: S101 - one of both is given
        (result,) = await generated(request, self._engine, [prompt], params)
        answers = [self._sglang_answer(body, prompt, sample) for sample in result.samples]
        return answers[0] if params.n == 1 else answers

    def _sglang_answer(self, body: SglangRequest, prompt: list[int], sample: SampleResult) -> dict[str, Any]:
        ends: dict[str, Any] = {"type": sample.finish_reason}
        if sample.finish_reason == "stop":
            last = sample.token_ids[-1]
            ends["matched"] = last if sample.stop_reason is None else sample.stop_reason
        elif sample.finish_reason == "length":
            ends["length"] = len(sample.token_ids)
        about: dict[str, Any] = {
            "id": body.rid or uuid.uuid4().hex,
            "finish_reason": ends,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sample.token_ids),
            "weight_version": sample.weight_versions[-1].version if sample.weight_versions else None,
        }
        if body.return_logprob:

            def entry(token: int, logprob: float) -> list[Any]:
                return [logprob, token, self._tokenizer.decode([token]) if body.return_text_in_logprobs else None]

            pairs = zip(sample.token_ids, sample.logprobs, strict=True)
            about["output_token_logprobs"] = [entry(*pair) for pair in pairs]
            if body.top_logprobs_num:
                about["output_top_logprobs"] = [[entry(*pair) for pair in top] for top in sample.top_logprobs]
        text = self._text(sample, body.sampling_params.skip_special_tokens)
        return {"text": text, "output_ids": sample.token_ids, "meta_info": about}

    async def _tokens(self, prompt: str | PromptTokens) -> list[int]:
        if isinstance(prompt, str):
            return await self._encode(TokenizeRequest(prompt=prompt))
        return prompt.prompt_token_ids

    def _text(self, sample: SampleResult, skip_special_tokens: bool) -> str:
        def decode(tokens: list[int]) -> str:
            text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
            return text

        return text_of(sample.token_ids, sample.stop_reason, decode)


def _entries(sample: SampleResult) -> list[dict[str, float]]:
    """Return the logprobs (nats) of each position by token id as text, the sampled token's first."""
    tops = sample.top_logprobs or [[]] * len(sample.token_ids)
    return [
        {str(token): logprob} | {str(other): value for other, value in top if other != token}
        for token, logprob, top in zip(sample.token_ids, sample.logprobs, tops, strict=True)
    ]
