"""`POST /generate`, the route of vLLM's API server and of SGLang, over any server.

A request that has `input_ids`, `text` or `sampling_params` is SGLang's; one that has `prompt` is vLLM's. Each sample
has the token ids and logprobs as they were sampled. No torch here: real vLLM's own process uses this module too.
"""

from __future__ import annotations

import uuid
from typing import Any, Protocol

from msgspec import Struct

from lachesis.pipeline.inference.protocol import PromptLogprobs, SamplingParams
from lachesis.pipeline.inference.serving.dialects import SglangRequest, VllmRequest
from lachesis.schemas.errors import DataError
from lachesis.schemas.values import convert_plain

__all__ = ["GenerateBackend", "TextSample", "answer_generate"]

_OF_SGLANG = {"input_ids", "text", "sampling_params"}


class TextSample(Struct, frozen=True, kw_only=True):
    """One sample as the route answers it."""

    token_ids: list[int]
    """The stop token included."""
    logprobs: list[float]
    """Nats, one for each token; empty if none were requested."""
    top_logprobs: list[list[tuple[int, float]]]
    """At each token the likeliest ones, as many as were requested."""
    finish_reason: str | None
    stop_reason: int | str | None
    """The stop token or the stop string that ended it; None: the end-of-sequence token, or neither."""
    text: str
    """Without what ended it."""
    weight_version: str | None
    """The weights of its last token; None if that is not known."""


class GenerateBackend(Protocol):
    """Samples and tokenizes text for one request."""

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""

    async def detokenize(self, tokens: list[int]) -> str:
        """Return the text of token ids, special tokens included."""

    async def sample(self, prompt: list[int], params: SamplingParams) -> tuple[list[TextSample], PromptLogprobs | None]:
        """Return `params.n` samples, and the prompt's logprobs if they are requested."""


async def answer_generate(given: dict[str, Any], backend: GenerateBackend) -> Any:
    """Return the answer to the body of a request.

    Raises `DataError` for a value that is wrong or not served.
    """
    if given.get("stream"):
        raise DataError("stream is not served here; leave it out, or use /v1/completions.")
    if _OF_SGLANG & given.keys():
        return await _sglang(convert_plain("the request", SglangRequest, given), backend)
    return await _vllm(convert_plain("the request", VllmRequest, given), backend)


async def _vllm(body: VllmRequest, backend: GenerateBackend) -> dict[str, Any]:
    params = body.params
    given = body.prompt
    prompt = await backend.tokenize(given) if isinstance(given, str) else given.prompt_token_ids
    samples, prompt_logprobs = await backend.sample(prompt, params)
    text = given if isinstance(given, str) else await backend.detokenize(prompt)  # what no context holds is refused
    answer: dict[str, Any] = {
        "text": [sample.text for sample in samples],
        "prompt": text,
        "finish_reasons": [sample.finish_reason for sample in samples],
        "prompt_token_ids": prompt,
        "token_ids": [sample.token_ids for sample in samples],
    }
    if params.logprobs is not None:
        answer["logprobs"] = [[[entry] for entry in _entries(sample)] for sample in samples]
    if prompt_logprobs is not None:
        answer["prompt_logprobs"] = [
            None if position is None else {token: one.logprob for token, one in position.items()}
            for position in prompt_logprobs
        ]
    return answer


async def _sglang(body: SglangRequest, backend: GenerateBackend) -> Any:
    params = body.params
    prompt = body.input_ids if body.text is None else await backend.tokenize(body.text)
    assert prompt is not None  # noqa: S101 - one of both is given
    samples, _ = await backend.sample(prompt, params)
    texts = await _token_texts(samples, backend) if body.return_logprob and body.return_text_in_logprobs else {}
    answers = [_sglang_answer(body, prompt, sample, texts) for sample in samples]
    return answers[0] if params.n == 1 else answers


def _sglang_answer(body: SglangRequest, prompt: list[int], sample: TextSample, texts: dict[int, str]) -> dict[str, Any]:
    ends: dict[str, Any] = {"type": sample.finish_reason}
    if sample.finish_reason == "stop" and sample.token_ids:
        last = sample.token_ids[-1]
        ends["matched"] = last if sample.stop_reason is None else sample.stop_reason
    elif sample.finish_reason == "length":
        ends["length"] = len(sample.token_ids)
    about: dict[str, Any] = {
        "id": body.rid or uuid.uuid4().hex,
        "finish_reason": ends,
        "prompt_tokens": len(prompt),
        "completion_tokens": len(sample.token_ids),
        "weight_version": sample.weight_version,
    }
    if body.return_logprob:

        def entry(token: int, logprob: float) -> list[Any]:
            return [logprob, token, texts.get(token)]

        pairs = zip(sample.token_ids, sample.logprobs, strict=True)
        about["output_token_logprobs"] = [entry(*pair) for pair in pairs]
        if body.top_logprobs_num:
            about["output_top_logprobs"] = [[entry(*pair) for pair in top] for top in sample.top_logprobs]
    return {"text": sample.text, "output_ids": sample.token_ids, "meta_info": about}


async def _token_texts(samples: list[TextSample], backend: GenerateBackend) -> dict[int, str]:
    """Return the text of each token that has a logprob."""
    tokens = {token for sample in samples for token in sample.token_ids}
    tokens |= {token for sample in samples for top in sample.top_logprobs for token, _ in top}
    return {token: await backend.detokenize([token]) for token in sorted(tokens)}


def _entries(sample: TextSample) -> list[dict[str, float]]:
    """Return the logprobs (nats) of each position by token id as text, the sampled token's first."""
    tops = sample.top_logprobs or [[]] * len(sample.token_ids)
    return [
        {str(token): logprob} | {str(other): value for other, value in top if other != token}
        for token, logprob, top in zip(sample.token_ids, sample.logprobs, tops, strict=True)
    ]
