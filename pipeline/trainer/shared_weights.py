"""Changes the trainer's weights in shared memory while the policy's server is paused.

Guarantees that weights change only while a server that has the previous version is paused, so that no token is sampled
from half-changed weights or under a wrong name; and that a trainer that waits for the server says so, and stops waiting
when it drains.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

import anyio
import anyio.from_thread
import anyio.to_thread

from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.errors import AccessError, InfrastructureError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.directory import InferenceDirectory, control_token, open_role
from lachesis.pipeline.inference.weights_lock import acquire_weights_lock
from lachesis.pipeline.model.shared_memory import WeightSegment
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.settings import TrainerSettings
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion

__all__ = ["SharedWeights", "sharing_weights"]

_POLL_S = 0.02
_SILENT_S = 10.0
"""Seconds of waiting for the server after which the trainer says so."""
_TOPIC = "shared weights"
_POINTER_BYTES = 4096
"""Room that a pointer file takes at most."""


class SharedWeights:
    """The segment that a trainer's weights are in, and the server that computes with them."""

    def __init__(self, service: Service, segment: WeightSegment, directory: InferenceDirectory, folder: Path) -> None:
        self._service = service
        self._segment = segment
        self._directory = directory
        self._folder = folder
        self._version: str | None = None

    def begin_version(self) -> None:
        """Take in that the weights are new: they change no more before `publish` names them."""
        self._version = None

    def publish(self, version: PolicyVersion) -> None:
        """Name the weights that are in the segment now. The policy record is to follow."""
        self._segment.publish(version)
        self._version = str(version)

    async def announce_again(self) -> None:
        """Write the pointer file once more: the one that was there is damaged or deleted."""
        write = partial(self._segment.announce, self._folder)
        await write_when_room(self._folder, write, needed_bytes=_POINTER_BYTES)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the weights in this context, in a worker thread.

        The server goes on once it has been sent their version.

        Raises `InfrastructureError` when the service drains before the server is ready for it.
        """
        turn: BinaryIO = anyio.from_thread.run(self._pause_server)
        with turn, self._segment.changing():
            yield

    async def wait_until_served(self) -> None:
        """Wait until the policy's server has the newest weights, which end with this process, or it drains."""
        if self._version is not None:
            await self._wait_for_server(self._ask_server, "the end of the trainer")

    async def _pause_server(self) -> BinaryIO:
        """Return the turn, with the server paused. It has the newest version then."""
        turns: list[BinaryIO] = []

        async def take_and_pause() -> str | None:
            turn = await acquire_weights_lock(self._folder)
            try:
                reason = await self._ask_server(pause=True)
            except BaseException:
                turn.close()
                raise
            if reason is None:
                turns.append(turn)
            else:
                turn.close()
            return reason

        reason = await self._wait_for_server(take_and_pause, "the next step")
        if reason is not None:
            raise InfrastructureError(f"the step was given up, waiting for the policy's server: {reason}")
        return turns[0]

    async def _wait_for_server(self, ask: Callable[[], Awaitable[str | None]], held_up: str) -> str | None:
        """Call `ask` until it returns no reason why the server is not ready; return the reason if it drains first."""
        since, said = anyio.current_time(), False
        while (reason := await ask()) is not None:
            if self._service.draining.is_set():
                return reason
            if not said and anyio.current_time() - since > _SILENT_S:
                said = True
                text = f"{held_up} waits for the policy's inference server: {reason}"
                self._service.set_problem(_TOPIC, text, held_up=[held_up], stops=True)
            await anyio.sleep(_POLL_S)  # the server offers nothing to wait on
        self._service.set_problem(_TOPIC, None)
        return None

    async def _ask_server(self, *, pause: bool = False) -> str | None:
        """Return what is missing until the server has the newest version. `pause`: pause it if nothing is."""
        if self._version is None:
            return "the digest of the weights is still being computed"
        client: InferenceClient | None = None
        with anyio.move_on_after(_POLL_S):
            client = await self._directory.current()
        if client is None:
            return "none has registered"
        try:
            served = await client.weight_version()
            if served != self._version:
                return f"it has policy {served}, not yet {self._version}"
            if pause:
                await client.pause("keep")
        except (AccessError, DataError, InfrastructureError) as error:
            return str(error)
        return None


@asynccontextmanager
async def sharing_weights(
    service: Service, settings: TrainerSettings, learner: Learner
) -> AsyncIterator[SharedWeights | None]:
    """Move the learner's weights into shared memory, if the run is set up so, and yield them; else None."""
    if settings.weights.transport != "shared_memory":
        yield None
        return
    folder = settings.folder / "weights"
    token = control_token(settings.folder, "policy")
    segment = await anyio.to_thread.run_sync(WeightSegment.share, learner.model)
    try:
        async with open_role(service.bus, settings.run, "policy", token=token) as directory:
            segment.announce(folder)
            shared = SharedWeights(service, segment, directory, folder)
            learner.changing = shared.changing
            yield shared
            await shared.wait_until_served()
    finally:
        segment.close(folder)
