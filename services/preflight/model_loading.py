"""Loads the models that the reference server is to serve here, and samples a token of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterator
from functools import partial

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.config.run import InferenceConfig, RunConfig
from lachesis.pipeline.inference.engine_table import engines_that
from lachesis.services.planned_processes import planned_processes

__all__ = ["model_loads"]

_PROMPT = [{"role": "user", "content": "Hello"}]
_WAIT_S = 600.0


def model_loads(config: RunConfig, failed: Container[str]) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield for each model the table of the role that serves it, and what loads and samples it.

    Not those whose setting is among the `failed` ones: what is wrong with them is known.
    """
    seen = set()
    for row in planned_processes(config):
        if row.service != "inference" or config.trains_elsewhere("inference", row.part) is not None:
            continue
        settings = config.role(row.part)
        name = settings.model or config.model
        setting = f"inference.{row.part}.model" if settings.model else "model"
        if not settings.spec.loads_here or name is None or setting in failed:
            continue
        tokenizer = settings.tokenizer if settings.tokenizer or settings.model else config.tokenizer
        tried = (name, tokenizer, config.chat_template_of(row.part), settings.dtype, settings.engine.max_model_len)
        if tried not in seen:
            seen.add(tried)
            yield f"inference.{row.part}", partial(_sample, config, name, tokenizer, row.part)


def _sample(config: RunConfig, name: str, tokenizer: str | None, role: str) -> str:
    try:
        from lachesis.pipeline.inference.engines.reference.engine import Engine
        from lachesis.pipeline.inference.engines.reference.placement import place
        from lachesis.pipeline.inference.protocol import SamplingParams
        from lachesis.pipeline.model.chat_template import render_chat
        from lachesis.pipeline.model.end_tokens import end_tokens
        from lachesis.pipeline.model.policy import ModelSetup, load_model
    except ModuleNotFoundError as error:
        return f"not sampled: needs {error.name}; {install_command('train')}"

    settings = config.role(role)
    setup = ModelSetup(
        tokenizer=tokenizer,
        chat_template=config.chat_template_of(role),
        exceptions=tuple(config.model_exceptions),
    )
    policy = load_model(name, setup)
    device = place(policy, settings, role)
    ends = end_tokens(policy.model, policy.tokenizer)
    prompt = render_chat(policy.tokenizer, _PROMPT)
    with Engine(policy.model, eos_token_id=ends, weight_version="doctor", config=settings.engine) as engine:
        begun = time.monotonic()
        engine.submit(prompt, SamplingParams(max_tokens=1)).result(_WAIT_S)
        seconds = time.monotonic() - begun
        millions = sum(parameter.numel() for parameter in policy.model.parameters()) / 1e6
        stops = policy.tokenizer.convert_ids_to_tokens(sorted(ends))
        return (
            f"{name} ({millions:.3g}M parameters) samples a token in {seconds:.2g} s on {device} in {settings.dtype}, "
            f"decoded {engine.decoding}, with a context of {engine.max_model_len}; ends at {', '.join(map(str, stops))}"
            f"{_faster(settings, device.type, role)}"
        )


def _faster(settings: InferenceConfig, device: str, role: str) -> str:
    """Return what would make the server faster on this machine."""
    if device == "cuda":
        return f"; several times as fast with {engines_that(lambda spec: not spec.loads_here, role)}"
    cores = len(os.sched_getaffinity(0))
    if settings.threads < cores // 2:
        return f"; faster with inference.{role}.threads, {settings.threads} of {cores} cores"
    return ""
