"""HTTP messages of an inference server, with vLLM's field names, as msgspec structs.

The routes and fields are those of vLLM's token-in, token-out endpoint (`/inference/v1/generate`, `--enable-scale-out`),
of `/tokenize` and `/detokenize`, and of its weight-update routes. Requests are strict: an unknown sampling parameter is
an error here, because ignoring it would change what is sampled. Responses are lenient: real vLLM sends more. No torch
here: clients import it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_BRANCHES",
    "Choice",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "FinishReason",
    "GenerateRequest",
    "GenerateResponse",
    "LoadedWeights",
    "LogprobEntry",
    "Logprobs",
    "PauseMode",
    "PromptBranch",
    "PromptLogprob",
    "PromptLogprobs",
    "SamplingParams",
    "StructuredOutputs",
    "TokenId",
    "TokenizeRequest",
    "TokenizeResponse",
    "WeightVersionSpan",
]

MAX_BODY_BYTES = 16 << 20
"""Bytes of a request to an inference server; a prompt of a million tokens has 7 MiB."""

MAX_BRANCHES = 256
"""Branches of a prompt in one request, at most."""

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
"""As in the int32 columns of rollouts."""
Logprob = Annotated[float, Meta(ge=-3e38, le=3e38)]
"""Nats; a finite float32."""
TopK = Annotated[int, Meta(ge=0, le=100)]


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the text of each sample must match; one of both is given.

    Tokens that cannot lead there have probability 0, and the logprobs are those of the others alone: they differ from
    the model's, whatever vLLM's `--logprobs-mode` is.
    """

    json: dict[str, Any] | None = None
    """A JSON schema."""
    structural_tag: str | None = None
    """A structural tag of xgrammar, as JSON."""

    def __post_init__(self) -> None:
        if (self.json is None) == (self.structural_tag is None):
            raise ValueError("exactly one of json and structural_tag must be given")


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to sample. Names and meanings are vLLM's."""

    n: Annotated[int, Meta(ge=1)] = 1
    """Samples of the prompt."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus: the smallest set of most likely tokens whose probability reaches top_p. 1 keeps all."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """New tokens of a sample at most; None: as many as the context holds."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    """Makes the draws of this request repeatable, whatever is batched with it; None: fresh randomness."""
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1000)] = []
    """Additional tokens that end a sample, like the end-of-sequence token. They stay in the output."""
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1000)]], Meta(max_length=16)] = []
    """Texts that end a sample. Their tokens stay in the output; its text ends before them."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    logprobs: TopK | None = None
    """None: no logprobs. k: the sampled token's logprob and those of the k likeliest tokens."""
    prompt_logprobs: TopK | None = None
    """As `logprobs`, for the prompt's own tokens, always at temperature 1."""
    sampling_mask: bool = False
    """Return which tokens `top_p` left at each token. The reference server alone does; vLLM has no such parameter."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM alone has it; the reference server refuses it."""


class PromptBranch(Struct, frozen=True, kw_only=True):
    """A further prompt: the first `shared` tokens of the one before it, then `token_ids`."""

    shared: Annotated[int, Meta(ge=0)]
    token_ids: Annotated[list[TokenId], Meta(min_length=1)]


class GenerateRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """POST /inference/v1/generate."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: SamplingParams
    model: str | None = None
    request_id: str | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    """text: also the detokenized text, without special tokens."""
    stream: bool = False
    """Streaming is refused by the reference server."""
    branches: Annotated[list[PromptBranch], Meta(max_length=MAX_BRANCHES)] = []
    """Prompts that are scored with this one, if `sampling_params` has `prompt_logprobs`; none of them is sampled from.
    Servers that have it say so in /v1/models; others, as vLLM, ignore it."""


class LogprobEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One token with its logprob (nats, at the sampling temperature): in mode tokens `token_id`, and `token_id:N` for
    clients that read `token`; in mode text its text.
    """

    logprob: Logprob
    token_id: int | None = None
    token: str | None = None
    rank: int | None = None
    top_logprobs: list[LogprobEntry] = []


class Logprobs(Struct, frozen=True, kw_only=True):
    """One entry for each generated token."""

    content: list[LogprobEntry] | None = None


class WeightVersionSpan(Struct, frozen=True, kw_only=True):
    """Output tokens `[start, end)` were sampled by the weights named `version`."""

    version: str
    start: int
    end: int


class Choice(Struct, frozen=True, kw_only=True):
    """One sample."""

    index: int
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    text: str | None = None
    routed_experts: str | None = None
    """Of a mixture-of-experts model, if the server records them: base64 of a numpy file, integers [rows, layers, k], a
    row for each token that was processed, from the first of the prompt on."""
    sampling_mask: str | None = None
    """If requested: the ids among which each token was sampled, as `sampling_mask.encode_mask` writes them."""


class PromptLogprob(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Logprob of one prompt token, or of an alternative to it. `rank` 1 is the likeliest."""

    logprob: Logprob
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt the logprobs (nats) by token id as text; None for the first, which follows nothing."""


class GenerateResponse(Struct, frozen=True, kw_only=True):
    """Answer of /inference/v1/generate. `prompt_logprobs`: null for the first token, then by token id as text.

    `branch_logprobs`: the same of each branch's own tokens.
    """

    choices: list[Choice]
    request_id: str = ""
    prompt_logprobs: PromptLogprobs | None = None
    output_mode: str = "tokens"
    branch_logprobs: list[PromptLogprobs] | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """POST /tokenize: either `messages` (through the chat template) or `prompt`."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    """Functions that the chat template names to the model, as OpenAI's routes name them."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Parameters of the chat template, as enable_thinking."""
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    """Default: true for `prompt`, false for `messages`, whose template adds its own."""

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("exactly one of messages and prompt must be given")


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[TokenId]


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | msgspec.UnsetType | None = msgspec.UNSET


class DetokenizeResponse(Struct, frozen=True, kw_only=True):
    """Answer of /detokenize. Special tokens are part of the text."""

    prompt: str


class LoadedWeights(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Report of a vLLM worker on the weights that it computes with, read from its model's memory."""

    digest: str | None = None
    """As `weights_digest`; None: not known, because of `unknown`."""
    rounded: str | None = None
    """The digest that they must have if it is not the version's: the model computes in a narrower dtype than weights
    travel in, so it holds what was delivered rounded. None: it holds them as they are."""
    unknown: list[str] = []
    """Tensors of the checkpoint that it holds in a form of its own."""
