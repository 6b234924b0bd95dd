"""Loads new policy versions into an inference server; if there are several, only the newest.

Works with any server that speaks vLLM's weight-update routes. The trainer waits for it only if weights are in shared
memory: then the trainer changes no weights before the server has the last ones. Guarantees that a version counts as
loaded only once the server reports it and, if the server is vLLM, computes with weights that have its digest; until
then the server stays paused, and is updated again. Guarantees too that a server whose samples would be too stale to
train on is paused until it has newer weights.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import anyio

from lachesis.pipeline.bus.newer_writers import confirm_newer_value
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import AccessError, InfrastructureError, NotFoundError
from lachesis.pipeline.inference.directory import InferenceDirectory
from lachesis.pipeline.inference.weight_traces import traced_update
from lachesis.pipeline.inference.weights_lock import acquire_weights_lock
from lachesis.pipeline.model.safetensors_files import UNFIT
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import keys
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import ConfigError, DataError, SchemaError, VersionError
from lachesis.schemas.notices import REFUSED_POLICY

__all__ = ["follow_policy"]

log = logging.getLogger("lachesis")

_REFUSED_S = 3.0
"""Seconds after which weights that were refused are tried again; each further refusal doubles them."""
_MAX_REFUSED_S = 60.0
"""The longest that this pause gets."""
_PAUSED = "paused policy"
PathOf = Callable[[PolicyRecord], Awaitable[str]]
"""Returns the path of a file with a record's weights, which it may fetch first."""


async def follow_policy(
    service: Service,
    directory: InferenceDirectory,
    loaded: anyio.Event,
    trainer: str,
    *,
    path_of: PathOf,
    max_behind: int | None = None,
    shared: Path | None = None,
) -> None:
    """Load each new policy record into the directory's server until cancelled.

    Set `loaded` after the first.

    `trainer` names the trainer that makes them: each update is a span of the step that made the weights. `max_behind`:
    optimizer steps that the server may be behind the newest policy; beyond, it is paused. None: it never is. `shared`:
    the pointer to the trainer's segment, where the weights are in shared memory and not in the record's file.
    """
    follower = _PolicyFollower(
        service, directory, loaded, trainer, path_of=path_of, max_behind=max_behind, shared=shared
    )
    async with background() as tasks:
        tasks.start_soon(follower.watch)
        await follower.load_newest()


class _SupersededError(Exception):
    """Raised when weights could not be loaded yet and there are newer ones."""


class _PolicyFollower:
    def __init__(
        self,
        service: Service,
        directory: InferenceDirectory,
        loaded: anyio.Event,
        trainer: str,
        *,
        path_of: PathOf,
        max_behind: int | None,
        shared: Path | None,
    ) -> None:
        self._service = service
        self._directory = directory
        self._loaded = loaded
        self._trainer = trainer
        self._path_of = path_of
        self._max_behind = max_behind
        self._shared = shared
        self._newest: PolicyRecord | None = None
        self._changed = anyio.Event()
        self._step: int | None = None  # of the weights that the server has; None: of none that are known
        self._paused = False
        self._server = anyio.Lock()  # so that a pause never lands behind the update that ends it

    async def watch(self) -> None:
        """Take in each new record, and pause the server where it leaves that too far behind."""
        async with self._service.bus.watch(keys.POLICY) as entries:
            async for entry in entries:
                try:
                    self._newest = decode(PolicyRecord, entry.value)
                except SchemaError as error:
                    if isinstance(error, VersionError):  # passing over it would be generating with ever older weights
                        await confirm_newer_value(self._service.bus, self._service.run, keys.POLICY, error)
                    log.warning("a policy record cannot be read: %s", error)
                    continue
                self._changed.set()
                await self._pause_if_late()

    async def load_newest(self) -> None:
        """Load the newest record whenever there is another one."""
        done: PolicyRecord | None = None
        refusals = 0
        """How many times in a row the newest record was refused."""
        while True:
            while self._newest is None or self._newest is done:
                await self._changed.wait()
                self._changed = anyio.Event()
            done = self._newest
            try:
                with traced_update(self._service, self._trainer, done.policy_version):
                    await self._load_until_superseded(done)
            except _SupersededError:
                continue
            except InfrastructureError:
                return  # draining
            except (AccessError, DataError, NotFoundError) as error:
                # Refused: pruned while we were away, or torn. The server goes on with the weights it has, under their
                # own version. A newer record follows only if the run can still train, so this one is tried again.
                if UNFIT in str(error) and not self._loaded.is_set():  # nor will any that follows
                    raise ConfigError(
                        f"the policy's server cannot take the weights that the trainer publishes: {error}. Both must "
                        "begin with the same model (`model` and inference.policy.model)"
                    ) from error
                log.warning("policy %s was refused: %s", done.version, error)
                self._say_refused(done, error, again=refusals > 0)
                await self._pause_if_late()
                self._changed = anyio.Event()
                with anyio.move_on_after(min(_REFUSED_S * 2**refusals, _MAX_REFUSED_S)):
                    while self._newest is done:
                        await self._changed.wait()
                refusals = refusals + 1 if self._newest is done else 0
                done = None
                continue
            refusals = 0
            self._service.mark_ok()
            self._service.set_problem(REFUSED_POLICY, None)
            self._service.set_problem(_PAUSED, None)
            self._loaded.set()
            self._service.vitals.metrics["policy/step"] = done.policy_version.step
            await self._pause_if_late()

    def _say_refused(self, record: PolicyRecord, error: Exception, *, again: bool) -> None:
        """Report a refused policy. `again`: no newer one has come since it was refused, as where a run stands still."""
        text = f"policy {record.version} was refused: {error}"
        if self._loaded.is_set() and not again:
            self._service.set_problem(REFUSED_POLICY, text, mend="it is tried again", version=record.version)
            return
        mend = "it is tried again, and the trainer publishes it again; see its log and the disk of the weights"
        self._service.set_problem(
            REFUSED_POLICY, text, mend=mend, held_up=["environments"], stops=True, version=record.version
        )

    async def _load_until_superseded(self, record: PolicyRecord) -> None:
        """Load a record's weights, again after each outage. Raises `_SupersededError` once there is a newer record."""
        async for attempt in self._service.retrying(f"load weights {record.version}"):
            if attempt.retry_state.attempt_number > 1 and self._newest is not record:
                raise _SupersededError(f"policy {record.version} could not be loaded before there was a newer one")
            with attempt:
                await self._load(record)

    async def _load(self, record: PolicyRecord) -> None:
        path = await self._path_of(record) if self._shared is None else str(self._shared)
        client = await self._directory.current()
        async with self._server:
            with nullcontext() if self._shared is None else await acquire_weights_lock(self._shared.parent):
                self._service.set_note("digest", await client.update_weights(path, record.version))
            found = await client.weight_version()
            if found != record.version:
                raise InfrastructureError(f"the server has weights {found} after an update to {record.version}")
            self._step, self._paused = record.policy_version.step, False

    async def _pause_if_late(self) -> None:
        """Pause the server if its samples would be too stale. The next update ends that."""
        if self._paused or self._max_behind is None or self._step is None or self._newest is None:
            return
        behind = self._newest.policy_version.step - self._step
        if behind <= self._max_behind or self._server.locked():  # an update is under way and checks this at its end
            return
        async with self._server:
            with suppress(AccessError, DataError, InfrastructureError):  # it samples nothing now, or is paused later
                await (await self._directory.current()).pause("keep")
                self._paused = True
                text = f"paused: its weights are {behind} steps behind, and {self._max_behind} may be trained on"
                log.warning("the inference server is %s", text)
                self._service.set_problem(_PAUSED, text)
