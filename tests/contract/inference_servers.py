"""The two inference servers, each started on a model that shows wrong weights: the reference server and real vLLM."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
import torch
import uvicorn
from anyio.from_thread import start_blocking_portal

from lachesis.pipeline.config.run import InferenceConfig
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.engines.vllm.process import start_vllm
from lachesis.pipeline.model.policy import PolicyModel, build_tiny_policy

__all__ = ["ARGUMENTS", "CPU", "KEY", "PYTHON", "TOKEN", "reference", "sharp_policy", "vllm"]

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
"""Where `make vllm` installs it."""
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # else each start compiles all of vLLM and torch again
}
TOKEN = "token"
"""What both want of who changes their state."""
KEY = "key"
"""What both want of everybody else."""
ARGUMENTS = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32"]


def sharp_policy(seed: int) -> PolicyModel:
    """Return a random policy whose distributions are far from uniform, so that wrong weights cost whole nats."""
    policy = build_tiny_policy(seed, width=128, layers=2, max_length=256)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return policy


@contextmanager
def reference(policy: PolicyModel, model: Path, folder: Path) -> Iterator[str]:
    """Serve the policy and yield the URL. `folder`: the run's."""
    listener = socket.create_server(("127.0.0.1", 0))
    with Engine(
        policy.model,
        eos_token_id=policy.tokenizer.eos_token_id,
        weight_version="default",
        decode=partial(policy.tokenizer.decode, skip_special_tokens=True),
    ) as engine:
        app = build_app(policy, engine, model_name="policy", weights_folder=folder / "weights", token=TOKEN, key=KEY,
                        aliases=["default"])  # fmt: skip
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            listener.close()


@contextmanager
def vllm(policy: PolicyModel, model: Path, folder: Path) -> Iterator[str]:
    """As `reference`."""
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed; `make vllm` installs it into .venv-vllm and runs this")
    settings = InferenceConfig(kind="vllm", python=str(PYTHON), args=ARGUMENTS)
    with pytest.MonkeyPatch.context() as patch, start_blocking_portal() as portal:
        for name, value in CPU.items():
            patch.setitem(os.environ, name, value)
        starting = start_vllm(
            settings,
            str(model),
            role="policy",
            folder=folder,
            tokenizer_hash=policy.tokenizer_hash,
            token=TOKEN,
            key=KEY,
        )
        with portal.wrap_async_context_manager(starting) as server:
            portal.call(_ready, server)
            yield server.url


async def _ready(server) -> None:
    with anyio.fail_after(1800):
        await server.ready()
