"""Measures vLLM behind one of its servers, which this process gives weights as a trainer does."""

import os
import re
import time
import traceback
from collections.abc import Awaitable
from pathlib import Path

import anyio
import numpy as np
import torch
from gpu.figures import check, figure
from gpu.models import DEVICE, THREADS

from lachesis.pipeline.config.run import InferenceConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.engines.vllm.process import start_vllm
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.device import prepare_device
from lachesis.pipeline.model.logprobs import SampledLogprobs
from lachesis.pipeline.model.policy import PolicyModel, save_policy
from lachesis.pipeline.model.shared_memory import WeightSegment, segment_pointer
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.model.tokenizer import build_character_tokenizer, tokenizer_hash
from lachesis.pipeline.model.weight_files import write_weights

__all__ = ["measure_server"]

_START_S = {"cuda": 100.0, "cpu": 400.0}
_SETTINGS = {
    "cpu": ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32"],
    "cuda": ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32", "--gpu-memory-utilization", "0.1",
             "--kv-cache-memory-bytes", str(1 << 30), "--attention-backend", "TRITON_ATTN"],
}  # fmt: skip
"""A cache of fixed size: vLLM would measure the free memory, which other parts on the card change meanwhile."""
_ENVIRONMENT = {
    "cpu": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    "cuda": {
        "TRITON_F32_DEFAULT": "ieee",  # the attention kernel's products in float32, as the learner's are
        "TORCH_COMPILE_DISABLE": "1",  # of small functions, at their first call
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the one that the CPU's vLLM has
        "VLLM_HOST_IP": "127.0.0.1",  # the machine may have no network
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    },
}
_ERRORS_SHOWN, _LINES_SHOWN, _LINE_CHARS = 12, 5, 400


def measure_server(command: str, folder: Path) -> None:
    """Start vLLM by this interpreter, and run all of it."""
    prepare_device(DEVICE, THREADS)
    os.environ |= {"HF_HUB_OFFLINE": "1"} | _ENVIRONMENT[DEVICE]
    anyio.run(_measure, command, folder)


def _policy() -> PolicyModel:
    """A random Qwen2 whose distributions are far from uniform, so that wrong weights cost whole nats."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_character_tokenizer(max_length=512)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.15,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    return PolicyModel(Qwen2ForCausalLM(config).eval(), tokenizer, tokenizer_hash(tokenizer))


async def _measure(command: str, folder: Path) -> None:
    policy = _policy()
    save_policy(policy, folder / "model")
    policy.model.to(DEVICE)
    settings = InferenceConfig(kind="vllm", python=command, args=_SETTINGS[DEVICE])
    began = time.perf_counter()
    async with start_vllm(
        settings, str(folder / "model"), role="policy", folder=folder, tokenizer_hash=policy.tokenizer_hash, token="t"
    ) as server:
        try:
            with anyio.fail_after(_START_S[DEVICE]):
                await server.ready()
        except (StartupError, TimeoutError) as error:
            check("vLLM starts", False, _said(error))
            return
        figure("vLLM, start", time.perf_counter() - began, "s")
        config = ClientConfig(url=server.url, timeout=60, connect_timeout=10)
        async with InferenceClient(config, token="t") as client:
            await _on_its_own("its logprobs", _agree(client, policy, "as it started"))
            await _on_its_own("its speed", _speed(client))
            await _on_its_own("weights by a file", _files(client, policy, folder))
            await _on_its_own("weights by shared memory", _shared(client, policy, folder))


async def _on_its_own(name: str, measured: Awaitable[None]) -> None:
    """Let one that fails not cost those after it."""
    try:
        await measured
    except Exception as error:  # noqa: BLE001 - whatever it is, the page says it
        check(f"vLLM, {name}", False, _said(error))
        traceback.print_exc()


def _said(error: Exception) -> str:
    """Return the error, and what vLLM has printed: it prints to where this process does."""
    log = Path("/proc/self/fd/2").resolve()
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|Exception)\b: ", line)]
    shown = [f"{type(error).__name__}: {error}", *errors[-_ERRORS_SHOWN:], *lines[-_LINES_SHOWN:]]
    return " / ".join(dict.fromkeys(line[:_LINE_CHARS] for line in shown))


async def _agree(client: InferenceClient, policy: PolicyModel, how: str) -> None:
    """Compare logprobs of 300 tokens with those of the learner."""
    tokens = np.random.default_rng(1).integers(5, 100, 300).tolist()
    theirs = (await client.prompt_logprobs(tokens))[1:]
    with torch.no_grad():
        ids = torch.tensor([tokens], device=DEVICE)
        ours = SampledLogprobs(policy.model, torch.float32)(ids, 1.0)[0][0].cpu().numpy()[1:]
    apart = np.abs(theirs - ours)
    figure(f"vLLM beside the learner, {how}, logprobs apart at most", float(apart.max()), "nats")
    check(f"vLLM computes with the learner's weights, {how}", float(apart.mean()) < 0.01, f"mean {apart.mean():.2g}")


async def _speed(client: InferenceClient) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=128, ignore_eos=True)
    await client.generate([10, 11, 12, 13], 1, params)
    began = time.perf_counter()
    samples = await client.generate([10, 11, 12, 13], 32, params)
    tokens = sum(len(sample.token_ids) for sample in samples)
    figure("vLLM, 32 x 128 over HTTP", tokens / (time.perf_counter() - began), "tokens/s")


def _move(policy: PolicyModel, seed: int) -> None:
    """Move every weight in place, as an optimizer step does."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter.device), alpha=0.02)


async def _files(client: InferenceClient, policy: PolicyModel, folder: Path) -> None:
    _move(policy, 1)
    tensors = policy_tensors(policy.model)
    version = policy_version(1, "a", tensors)
    path = write_weights(tensors, folder / "weights", version)
    began = time.perf_counter()
    await client.update_weights(str(path), str(version))
    figure("vLLM, weights taken from a file", time.perf_counter() - began, "s")
    await _agree(client, policy, "by a file")


async def _shared(client: InferenceClient, policy: PolicyModel, folder: Path) -> None:
    """Share one copy: in main memory, or on the GPU by CUDA IPC."""
    segment = WeightSegment.share(policy.model)
    try:
        segment.announce(folder / "weights")
        for seed in (2, 3):
            with segment.changing():
                _move(policy, seed)
            version = policy_version(seed, "a", policy_tensors(policy.model))
            segment.publish(version)
            began = time.perf_counter()
            await client.update_weights(str(segment_pointer(folder / "weights")), str(version))
            figure(f"vLLM, shared weights of step {seed} named", time.perf_counter() - began, "s")
            await _agree(client, policy, f"by shared memory, step {seed}")
    finally:
        segment.close(folder / "weights")
