"""Serves a role of the run by vLLM, as a child process of the service."""

from functools import partial

import anyio
import anyio.to_thread

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.inference.directory import InferenceDirectory, control_token
from lachesis.pipeline.inference.engines.vllm.process import start_vllm
from lachesis.pipeline.inference.http_service import announce
from lachesis.pipeline.inference.settings import ServerSettings
from lachesis.pipeline.model.pretrained_tokenizer import load_tokenizer
from lachesis.pipeline.model.shared_memory import segment_pointer
from lachesis.pipeline.model.tokenizer import tokenizer_hash
from lachesis.pipeline.runtime.service import Service

__all__ = ["serve_vllm"]


async def serve_vllm(service: Service, settings: ServerSettings, model: str) -> None:
    """Serve a role by vLLM, as a child process, until the service drains."""
    role, tokenizer = settings.role, settings.tokenizer or model
    pointer = segment_pointer(settings.folder / "weights") if settings.shares_weights else None
    found = await anyio.to_thread.run_sync(partial(load_tokenizer, tokenizer, settings.chat_template))
    async with (
        start_vllm(
            settings.config,
            model,
            role=role,
            folder=settings.folder,
            tokenizer_hash=tokenizer_hash(found),
            token=control_token(settings.folder, role),
            key=settings.access.key(),
            tokenizer=settings.own_tokenizer,
            chat_template=found.chat_template if settings.chat_template else None,
            routed_experts=settings.routed_experts,
        ) as server,
        InferenceDirectory(timeout_s=120.0) as own,
        service.until_drained(),
    ):
        await service.starts_with(f"starting vLLM with model {model}")
        await server.ready()
        await own.use(server.url, server.token)
        async with background() as tasks:
            tasks.start_soon(server.watch)
            url = settings.config.advertise or server.url
            await announce(service, settings, own, url, pointer=pointer)
