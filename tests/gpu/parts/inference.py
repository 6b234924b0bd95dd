"""The reference server's engine beside transformers' `generate`, on the same model and prompts."""

import time
from typing import Any

import torch
from gpu.figures import check, figure, left_out
from gpu.models import DEVICE, THREADS, model_of

from lachesis.pipeline.inference.config import EngineConfig
from lachesis.pipeline.inference.engine import Engine
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.device import prepare_device

__all__ = ["measure"]


def measure(*, small: bool) -> None:
    """Measure the CPU, and the GPU if there is one."""
    shape, rows, tokens = ("tiny", 4, 16) if small else ("0.135B", 64, 128)
    for device in dict.fromkeys(("cpu", DEVICE)):
        on_gpu = device == "cuda"
        prepare_device(device, THREADS)
        given = (rows, tokens) if on_gpu or small else (16, 32)
        model = model_of(shape, device, sharpened=3.0)
        prompts = torch.randint(5, 500, (given[0], 16), generator=torch.Generator().manual_seed(0)).tolist()
        theirs = _generate(model, prompts, given[1])
        try:
            ours, greedy, again = _engine(model, prompts, given[1])
        except Exception as error:  # noqa: BLE001 - an engine that knows this device not says so in its own way
            left_out(f"the engine on {device}", f"{type(error).__name__}: {error}"[:200])
            continue
        figure(f"{shape} on {device}, generate, {given[0]} x {given[1]}", theirs, "tokens/s")
        figure(f"{shape} on {device}, engine, {given[0]} x {given[1]}", ours, "tokens/s")
        figure(f"{shape} on {device}, engine beside generate", ours / theirs, "of its speed")
        check(f"temperature 0 gives the same tokens twice on {device}", greedy == again)


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


def _engine(model: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]], list[list[int]]]:
    """Return the engine's tokens a second, and what it samples at temperature 0, twice."""
    with Engine(model, eos_token_id=1, weight_version="w", config=EngineConfig()) as engine:

        def run(temperature: float) -> list[list[int]]:
            params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
            waiting = [engine.submit(prompt, params) for prompt in prompts]
            return [list(sample.token_ids) for one in waiting for sample in one.result(120).samples]

        run(1.0)
        began = time.perf_counter()
        run(1.0)
        rate = len(prompts) * tokens / (time.perf_counter() - began)
        return rate, run(0.0), run(0.0)
