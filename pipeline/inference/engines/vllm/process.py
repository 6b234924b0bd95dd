"""Runs real vLLM as a child process.

Starts it for a role of the run, waits until it is ready, and stops it.

Guarantees: its routes for weights need a token that only the run's own processes have, the others a key if there is
one; it may read weights only from the run's folder; it sees none of the run's secrets; its output is in the service's
log; and it ends with the service, however that ends. No torch here: vLLM may live in an environment of its own, which
needs nothing of this project installed.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.to_thread

import lachesis
from lachesis.pipeline.common.child_process import die_with_parent
from lachesis.pipeline.common.foreign_variables import without_service_variables
from lachesis.pipeline.common.machine_memory import free_on_machine
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig, InferenceConfig
from lachesis.pipeline.inference.engines.vllm.end_reason import OutputMark
from lachesis.pipeline.inference.engines.vllm.names import (
    CONTROL_TOKEN,
    SAMPLING_KEY,
    TOKENIZER_HASH,
    TRANSFER_BACKEND,
    WEIGHTS_FOLDER,
)
from lachesis.pipeline.inference.engines.vllm.parent_watch import OWNER
from lachesis.pipeline.inference.engines.vllm.process_group_memory import has_processes, remove_names, shared_names

__all__ = ["Vllm", "start_vllm"]

log = logging.getLogger("lachesis")

_ENTRY = "vllm.entrypoints.launchers.api_server.entry"
_CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"
_CPU_CACHE_SHARE = 0.25
"""Share of the free memory: the trainer and other servers start beside it."""
_CACHE_OPTIONS = ("--gpu-memory-utilization", "--kv-cache-memory")
_POLL_S = 0.5
_SILENT_S = 60.0
"""Unhealthy for so long, it counts as hung."""
_GROUP_POLL_S = 0.05
_END_S = 5.0
"""From SIGTERM to SIGKILL."""


class Vllm:
    """A running server. Its process group is its own, so that its workers end with it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, token: str, output: OutputMark) -> None:
        self.url = url
        self.token = token
        self._process = process
        self._output = output
        self._memory: set[str] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> None:
        """Wait until the model is loaded. Raises StartupError when the process ends instead."""
        async with InferenceClient(ClientConfig(url=self.url, timeout=_SILENT_S)) as client:
            while not await client.ready():
                self._check_running()
                await anyio.sleep(_POLL_S)
        self._check_running()  # else somebody else answers on its port
        await self._look_at_memory()

    async def watch(self) -> None:
        """Run until the server ends or hangs, and raise StartupError then."""
        healthy = anyio.current_time()
        async with InferenceClient(ClientConfig(url=self.url, timeout=_SILENT_S)) as client:
            while anyio.current_time() - healthy < _SILENT_S:
                with anyio.move_on_after(_POLL_S):
                    await self._process.wait()
                self._check_running()
                if await client.ready():
                    healthy = anyio.current_time()
        raise StartupError(f"vLLM (pid {self.pid}) has not been healthy for {_SILENT_S:g} s; it is ended")

    async def stop(self) -> None:
        """End it and everything it has started: first politely."""
        with anyio.CancelScope(shield=True):
            await self._look_at_memory()
            self._signal(signal.SIGTERM)
            with anyio.move_on_after(_END_S):
                await self._process.wait()
                await self._until_group_ends()  # Python's tracker among them, which removes shared memory
            self._signal(signal.SIGKILL)  # also what is left of the group
            await self._process.wait()
            with anyio.move_on_after(_END_S):
                await self._until_group_ends()
            if removed := await anyio.to_thread.run_sync(remove_names, self._memory):
                log.info("removed shared memory that vLLM has left: %s", ", ".join(removed))

    async def _look_at_memory(self) -> None:
        self._memory |= await anyio.to_thread.run_sync(shared_names, self.pid)

    async def _until_group_ends(self) -> None:
        while await anyio.to_thread.run_sync(has_processes, self.pid):  # noqa: ASYNC110 - there is no event to wait for
            await anyio.sleep(_GROUP_POLL_S)

    def _check_running(self) -> None:
        self._output.poll()
        if self._process.returncode is not None:
            reason = self._output.reason()
            why = f": {reason}" if reason else "; its output above says why"
            raise StartupError(
                f"vLLM ended with code {self._process.returncode}{why}. It was started with python and args of "
                "[inference.ROLE]"
            )

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@asynccontextmanager
async def start_vllm(
    settings: InferenceConfig,
    model: str,
    *,
    role: str,
    folder: Path,
    tokenizer_hash: str,
    token: str,
    key: str | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    routed_experts: bool = False,
) -> AsyncIterator[Vllm]:
    """Start vLLM for `role` and yield it, ready or not; it is stopped at the end.

    `tokenizer`: in place of the one beside the weights. `chat_template`: the text of one in place of the tokenizer's.
    `routed_experts`: record which ones process each token.

    `folder`: the run's. `token`: needed by a request that changes its state, `key` by any other; None: not needed.

    Raises StartupError when there is no such interpreter.
    """
    port = settings.port or _free_port()
    python = settings.python or sys.executable
    apart = [] if tokenizer is None else ["--tokenizer", tokenizer]
    if chat_template is not None:
        file = folder / "inference" / f"{role}.chat_template.jinja"
        await anyio.Path(file.parent).mkdir(parents=True, exist_ok=True)
        await anyio.Path(file).write_text(chat_template, encoding="utf-8")
        apart += ["--chat-template", str(file)]
    recorded = ["--enable-return-routed-experts"] * routed_experts
    command = [python, "-m", _ENTRY, *_arguments(model, role, settings.host, port), *apart, *recorded, *settings.args]
    secrets = {CONTROL_TOKEN: token} | ({} if key is None else {SAMPLING_KEY: key})
    log.info("starting %s", " ".join(command))
    output = OutputMark()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            env=_environment(folder, role, tokenizer_hash)
            | _visible_gpus(settings.gpus)
            | cpu_cache_variables(settings.args, os.environ)
            | {OWNER: str(os.getpid()), "PYTHONSAFEPATH": "1"}  # as -P, which an older Python would not take
            | secrets,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGTERM),  # it ends its workers then; see `parent_watch.py`
        )
    except OSError as error:
        raise StartupError(f"inference.{role}.python: cannot run {python}: {error}") from error
    server = Vllm(process, f"http://{settings.local_address}:{port}", token, output)
    try:
        yield server
    finally:
        await server.stop()


def _arguments(model: str, role: str, host: str, port: int) -> list[str]:
    """Return the arguments of vLLM: token ids in and out, logprobs as sampled, our weights."""
    return [
        *("--model", model, "--served-model-name", *dict.fromkeys((role, "default", model, Path(model).name))),
        *("--host", host, "--port", str(port)),
        *("--generation-config", "vllm"),  # sampling is what the request says, whatever lies beside the model
        "--enable-scale-out",
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),  # <tool_call>{...}</tool_call>
        *("--logprobs-mode", "processed_logprobs"),
        *("--worker-extension-cls", "lachesis.pipeline.inference.engines.vllm.worker.WorkerExtension"),
        *("--weight-transfer-config", json.dumps({"backend": TRANSFER_BACKEND})),
        *("--middleware", "lachesis.pipeline.inference.engines.vllm.middleware.VllmMiddleware"),
        "--disable-uvicorn-access-log",
    ]


def _environment(folder: Path, role: str, tokenizer_hash: str) -> dict[str, str]:
    """Return vLLM's environment: ours without the run's settings and secrets, and with this package in reach.

    Only this package: the interpreter's own packages must not hide behind ours.
    """
    home = folder / "vllm" / role
    home.mkdir(parents=True, exist_ok=True)
    link, package = home / "lachesis", Path(lachesis.__file__).parent
    if not link.is_symlink() or link.readlink() != package:
        link.unlink(missing_ok=True)
        link.symlink_to(package)
    environ = {
        name: value
        for name, value in without_service_variables(os.environ, "VLLM_").items()  # a service called vllm: VLLM_PORT
        if not name.startswith(("LACHESIS_", "NATS_"))
    }
    return environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(home), environ.get("PYTHONPATH")])),
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for weights
        "VLLM_NO_USAGE_STATS": "1",
        WEIGHTS_FOLDER: str(folder / "weights"),
        TOKENIZER_HASH: tokenizer_hash,
    }


def _visible_gpus(gpus: list[int]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}


def cpu_cache_variables(arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return how much memory vLLM's cache may take on a CPU, where nothing says that.

    Builds for GPUs do not read it. Its own default is nearly all of the machine's memory, and it refuses to start where
    others have some of it.
    """
    if environ.get(_CPU_CACHE) or any(one.startswith(_CACHE_OPTIONS) for one in arguments):
        return {}
    free = free_on_machine()
    if free is None:
        return {}
    gib = max(1, int(free * _CPU_CACHE_SHARE) >> 30)
    log.info(
        "on a CPU, vLLM's cache takes %d GiB, a quarter of what is free now; %s says another size", gib, _CPU_CACHE
    )
    return {_CPU_CACHE: str(gib)}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
