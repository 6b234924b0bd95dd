"""Configuration of inference servers and of their client."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lachesis.pipeline.bus.addresses import url_host
from lachesis.pipeline.common.loopback import LOOPBACK
from lachesis.pipeline.common.paths import (
    Address,
    FilePath,
    ModelPath,
    ProgramArguments,
    ProgramPath,
    TemplatePath,
)
from lachesis.pipeline.extension import EngineSpec
from lachesis.pipeline.inference.engine_table import DEFAULT_ENGINE, engines

__all__ = ["ClientConfig", "EngineConfig", "InferenceConfig"]

PositiveInt = Annotated[int, Meta(gt=0)]
Positive = Annotated[float, Meta(gt=0)]


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the engine."""

    max_model_len: PositiveInt | None = None
    """Longest prompt and completion together, tokens. Default None: the model's own context length."""
    max_running_sequences: PositiveInt = 256
    """Samples decoded together. Default 256."""
    max_prefill_tokens: PositiveInt = 8192
    """Prompt tokens (padded) read in one pass, unless a single prompt is longer. Default 8192."""
    max_waiting_requests: PositiveInt = 256
    """Requests that may wait for a place; one more is refused with 503 and Retry-After. Default 256."""
    max_top_logprobs: PositiveInt = 1 << 23
    """Logprobs of likeliest tokens (`logprobs`, `prompt_logprobs`) that requests at work may hold, for all of their
    tokens together: some 150 bytes each. One that asks for more is refused. Default 8,388,608."""


class ClientConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a client reaches an inference server."""

    url: str
    """Base URL, for example http://127.0.0.1:8000."""
    timeout: Positive = 120.0
    """Seconds until an answer must be complete. Default 120."""
    connect_timeout: Positive = 5.0
    """Seconds until a connection must stand. Default 5."""
    max_connections: PositiveInt = 128
    """Requests in flight at once; more wait. Default 128."""


class InferenceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One inference server, known to the others by its role: policy, teacher or eval."""

    url: Address | None = None
    """URL of an existing server that speaks vLLM's routes. Default None: one is started."""
    kind: str = DEFAULT_ENGINE
    """What is started: reference, the reference server; vllm, as a process of its own; or an engine that an extension
    adds. Default reference."""
    model: ModelPath | None = None
    """Local folder or Hugging Face id. Default None: the model the run trains."""
    tokenizer: ModelPath | None = None
    """Folder or Hugging Face id of the model's tokenizer. Default None: the one that lies beside its weights; of the
    model that the run trains, its `tokenizer`."""
    chat_template: TemplatePath | None = None
    """Chat template of the model, as `chat_template` of a run. Default None: the one that lies beside its tokenizer; of
    the model that the run trains, its `chat_template`."""
    host: Address = "127.0.0.1"
    """Address that the server listens on. It speaks plain HTTP; on any other address than loopback it wants the key of
    `key_file` of everybody. Default 127.0.0.1."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of the server. Default 0: any free one, found through the bus."""
    advertise: Address | None = None
    """URL under which the others reach the server, http://inference:8000 say. Default None: http://host:port."""
    key_file: FilePath | None = None
    """File that holds the key that clients must send as a bearer token, which OpenAI's call an API key; with `url`, the
    key of that server. Default None: without `url` and off loopback, inference/ROLE.key in the run's folder, made at
    the first start; else no key."""
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """Where the reference server computes: auto, cpu, cuda or cuda:N. auto: on a GPU if torch sees one, the last of
    several, since the trainer takes the first. Default auto."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the reference server computes in. bfloat16 takes half the memory; its logprobs differ from the trainer's by
    rounding, some .01 nats. Default float32."""
    threads: PositiveInt = 1
    """CPU threads of the reference server. Default 1."""
    engine: EngineConfig = EngineConfig()
    """Limits of the reference server."""
    python: ProgramPath | None = None
    """Interpreter of the environment that vLLM is installed in. Default None: the one that runs the service."""
    gpus: list[Annotated[int, Meta(ge=0)]] = []
    """GPUs that vLLM sees, as CUDA_VISIBLE_DEVICES numbers them: of several servers on one machine each needs its own.
    Default empty: all that the service sees."""
    args: ProgramArguments = []
    """Further arguments of vLLM's server, for example ["--dtype", "bfloat16", "--max-model-len", "8192"]."""

    @property
    def spec(self) -> EngineSpec:
        """The engine that is started."""
        return engines()[self.kind]

    @property
    def needs_key(self) -> bool:
        """Whether requests for samples must bear a key."""
        return self.key_file is not None or (self.url is None and self.host not in LOOPBACK)

    @property
    def local_address(self) -> str:
        """Where the machine itself reaches a server that listens on `host`."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared, not bound
        return url_host(host)
