"""A stand-in for an inference server that takes the same time for every request, whatever else is requested meanwhile.

    python tests/benchmarks/constant_engine.py --folder MODEL --port 8000 --seconds 0.2

Routes, tokenizer, chat template and HTTP are those of the reference server; no model computes: each sample is the same
tokens, with made-up logprobs. For measuring what stands before an engine, without a model that uses up the processors.
"""

import argparse
import asyncio
import gc
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import anyio

from lachesis.pipeline.inference.prompt_tree import PromptPath
from lachesis.pipeline.inference.protocol import PauseMode, SamplingParams, WeightVersionSpan
from lachesis.pipeline.inference.serving.app import ServedTokens, serving_app
from lachesis.pipeline.inference.serving.results import GenerationResult, SampleResult, TokenListener
from lachesis.pipeline.model.pretrained_tokenizer import load_tokenizer
from lachesis.pipeline.model.tokenizer import tokenizer_hash
from lachesis.pipeline.runtime.http import HttpServer


class ConstantTimeEngine:
    """Answers each request `seconds` after it came, with as many of `tokens` as it may have."""

    def __init__(self, tokens: Sequence[int], version: str, seconds: float, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.weight_version = version
        self.is_paused = False
        self.scores_branches = False
        self._tokens = list(tokens)
        self._seconds = seconds

    def check_alive(self) -> None:
        """It always runs."""

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        listener: TokenListener | None = None,
        branches: Sequence[PromptPath] = (),
    ) -> Future[GenerationResult]:
        """See `SamplingEngine`."""
        found: Future[GenerationResult] = Future()
        began_ns = time.perf_counter_ns()
        ids = self._tokens[: params.max_tokens]
        logprobs = [-1.0 - place / 64 for place in range(len(ids))]
        spans = [WeightVersionSpan(version=self.weight_version, start=0, end=len(ids))]
        samples = [SampleResult(ids, logprobs, [[] for _ in ids], "length", None, spans) for _ in range(params.n)]
        scored = None
        if params.prompt_logprobs is not None:
            scored = [None, *({str(token): {"logprob": -1.0}} for token in prompt[1:])]

        def end() -> None:
            if found.set_running_or_notify_cancel():
                result = GenerationResult(samples, scored, began_ns, began_ns, time.perf_counter_ns())  # type: ignore[arg-type]
                found.set_result(result)

        asyncio.get_running_loop().call_later(self._seconds, end)
        return found

    def pause(self, mode: PauseMode) -> Future[None]:
        """See `SamplingEngine`."""
        self.is_paused = True
        return _done()

    def resume(self) -> Future[None]:
        """See `SamplingEngine`."""
        self.is_paused = False
        return _done()

    def load_weights(self, tensors: Any, weight_version: str) -> Future[None]:
        """Take the version's name alone."""
        self.weight_version = weight_version
        return _done()


def _done() -> Future[None]:
    found: Future[None] = Future()
    found.set_result(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, help="folder of the model whose tokenizer it has")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--version", default="0-standin-none", help="policy version of its first tokens")
    wanted = parser.parse_args()
    tokenizer = load_tokenizer(wanted.folder)
    text = tokenizer.encode("the same sixteen", add_special_tokens=False)
    engine = ConstantTimeEngine(text, wanted.version, wanted.seconds, 2048)
    served = ServedTokens(tokenizer, tokenizer_hash(tokenizer), len(tokenizer))
    gc.freeze()  # or each collection stops it for the time of an answer: half a million objects were imported
    app = serving_app(served, engine, model_name="policy", read_weights=lambda path, version: None)
    with socket.create_server(("127.0.0.1", wanted.port), backlog=1024) as listener:
        anyio.run(HttpServer.over(app, grace_s=1).serve_until_cancelled, [listener])


if __name__ == "__main__":
    main()
