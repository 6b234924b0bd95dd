"""The reference server's engine beside transformers' `generate`, on the same model and prompts."""

import time
from typing import Any

import torch
from gpu.figures import check, figure
from gpu.models import DEVICE, THREADS, model_of

from lachesis.pipeline.inference.config import EngineConfig, InferenceConfig
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.engines.reference.placement import place
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.policy import PolicyModel

__all__ = ["measure"]


def measure(*, small: bool) -> None:
    """Measure the CPU, and the GPU if there is one, in both dtypes that a server may compute in."""
    shape, rows, tokens = ("tiny", 4, 16) if small else ("0.135B", 64, 64)
    ways = [("cuda", dtype) for dtype in ("bfloat16", "float32") if DEVICE == "cuda"] + [("cpu", "float32")]
    for device, dtype in ways:
        given = (rows, tokens) if device == "cuda" or small else (8, 16)
        policy = PolicyModel(model_of(shape, "cpu", sharpened=3.0), None, "")
        place(policy, InferenceConfig(device=device, dtype=dtype, threads=THREADS), "policy")  # type: ignore[arg-type]
        prompts = torch.randint(5, 500, (given[0], 16), generator=torch.Generator().manual_seed(0)).tolist()
        theirs = _generate(policy.model, prompts, given[1])
        ours, greedy, again, decoding = _engine(policy.model, prompts, given[1])
        name = f"{shape} on {device} in {dtype}"
        figure(f"{name}, generate, {given[0]} x {given[1]}", theirs, "tokens/s")
        figure(f"{name}, engine, {given[0]} x {given[1]}", ours, "tokens/s")
        figure(f"{name}, engine beside generate", ours / theirs, "of its speed")
        if device == "cuda":
            check(f"a step is one CUDA graph in {dtype}", "CUDA graph" in decoding, decoding)
        check(f"temperature 0 gives the same tokens twice on {device} in {dtype}", greedy == again)


def _generate(model: Any, prompts: list[list[int]], tokens: int) -> float:
    """Return tokens a second of transformers."""
    ids = torch.tensor(prompts, device=model.device)
    given: dict[str, Any] = {"do_sample": True, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}

    def run() -> None:
        with torch.no_grad():
            model.generate(ids, attention_mask=torch.ones_like(ids), **given)

    run()
    began = time.perf_counter()
    run()
    return ids.shape[0] * tokens / (time.perf_counter() - began)


def _engine(model: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]], list[list[int]], str]:
    """Return the engine's tokens a second, what it samples at temperature 0, twice, and how it decodes."""
    with Engine(model, eos_token_id=1, weight_version="w", config=EngineConfig()) as engine:

        def run(temperature: float) -> list[list[int]]:
            params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
            waiting = [engine.submit(prompt, params) for prompt in prompts]
            return [list(sample.token_ids) for one in waiting for sample in one.result(120).samples]

        run(1.0)
        began = time.perf_counter()
        run(1.0)
        rate = len(prompts) * tokens / (time.perf_counter() - began)
        return rate, run(0.0), run(0.0), engine.decoding
