"""Publishes the trainer's weights while the next step is taken.

After a step it stores the policy's weights where inference servers find them, and then publishes the policy record that
names them. Guarantees: the weights are those of the step, whatever is trained meanwhile, since they are copied at once
(or, in shared memory, left unchanged until a server has them); a record is published only after its weights are stored;
and the published policy is at most one version behind, since the next one is copied only once this one is published.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import anyio
import anyio.to_thread
import torch
from anyio.abc import TaskGroup

from lachesis.pipeline.common.tokenizer_hash import probe_of
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.inference.weight_traces import traced_publication
from lachesis.pipeline.model.host_memory import HostCopies
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.model.safetensors_files import weights_path
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.pipeline.trainer.memory import raise_out_of_memory
from lachesis.pipeline.trainer.serial_jobs import SerialJobs
from lachesis.pipeline.trainer.settings import TrainerSettings
from lachesis.pipeline.trainer.shared_weights import SharedWeights
from lachesis.pipeline.trainer.train_loop import publish_with_retries
from lachesis.pipeline.weights.sender import weights_sender
from lachesis.schemas.ids import PolicyVersion

__all__ = ["COPY_ADVICE", "PolicyPublisher"]

COPY_ADVICE = "a smaller model, or a machine with more memory; `lachesis plan` counts the copies"
"""What to do where there is no room for copies."""


class PolicyPublisher:
    """Publishes versions of `policy` of the training attempt `lineage`, by tasks of `tasks`.

    `vocabulary`: how many token ids the model knows, None where it does not say. `shared`: the segment that the weights
    are in; None: they are in none.
    """

    def __init__(
        self,
        service: Service,
        settings: TrainerSettings,
        feed: BatchFeed,
        policy: PolicyModel,
        tasks: TaskGroup,
        *,
        lineage: str,
        vocabulary: int | None,
    ) -> None:
        self.shared: SharedWeights | None = None
        self._service = service
        self._settings = settings
        self._feed = feed
        self._policy = policy
        self._lineage = lineage
        self._vocabulary = vocabulary
        self._token_probe = probe_of(policy.tokenizer, vocabulary)
        self._sender = weights_sender(
            service.bus,
            settings.run,
            settings.weights,
            folder=settings.folder,
            budget=settings.weights_bytes,
            kept=settings.training.weights_kept,
        )
        # the sender of differences needs the version before as well
        self._copies = HostCopies(2 if settings.weights.transport == "nats" else 1)
        self._publications = SerialJobs(tasks)
        self._publishing = anyio.Lock()
        self._newest: tuple[int, Mapping[str, torch.Tensor]] | None = None

    async def publish(self, step: int) -> None:
        """Take the weights as they are after `step` steps; return as soon as they may change again."""
        async with self._publishing:
            await self._publications.finish()
            if self.shared is not None:
                self.shared.begin_version()
            self._newest = None
            tensors = await anyio.to_thread.run_sync(self._copy_weights)
            self._newest = step, tensors
            await self._publications.start(partial(self._publish, step, tensors))

    async def publish_again(self, version: str) -> None:
        """Store and announce the newest weights once more, if they are of this version.

        The stored ones are damaged. Weights in shared memory are stored nowhere else: only their pointer can be.
        """
        async with self._publishing:
            await self._publications.finish()  # else the newest weights may be those of the next version
            policy = self._feed.policy
            if self._newest is None or policy is None or policy.version != version:
                return
            if self.shared is not None:
                await self.shared.announce_again()
                return
            self._sender.forget()
            await self._publications.start(partial(self._publish, *self._newest))

    async def finish(self) -> None:
        """Wait until the newest weights are published."""
        await self._publications.finish()

    def _copy_weights(self) -> Mapping[str, torch.Tensor]:
        """Return the weights, copied where they are not shared. Raises `OutOfMemoryError`."""
        device = next(self._policy.model.parameters()).device
        with raise_out_of_memory(device, "the copy of the weights for servers", COPY_ADVICE):
            tensors = policy_tensors(self._policy.model)
            if self.shared is not None:
                return tensors  # they change only once a server has them, which learns of them by their record
            return self._copies.copy(tensors, self._settings.weights.dtype)

    async def _publish(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        with traced_publication(self._service, self._settings.training.name, step):
            await self._store_and_announce(step, tensors)
        self._service.mark_ok()
        with suppress(InfrastructureError):  # what it leaves goes with the next one
            await self._sender.expire()

    async def _store_and_announce(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store the weights, or name them if they are shared, and announce them; inference servers follow.

        If weights are shared, only the evaluations' server needs files, and only of the policies that it is to
        evaluate.
        """
        drain_s = self._settings.drain_s
        sent: tuple[PolicyVersion, str] | None = None

        async def send() -> None:
            nonlocal sent
            sent = await self._sender.send(step, self._lineage, tensors)

        if self.shared is None or step in self._settings.evaluable:
            await publish_with_retries(self._service, drain_s, "store the weights", send)
        if sent is None:
            version = await anyio.to_thread.run_sync(policy_version, step, self._lineage, tensors)
            sent = version, str(weights_path(self._settings.folder / "weights", version))
        version, location = sent
        if self.shared is not None:
            self.shared.publish(version)
        hash_, probe = self._policy.tokenizer_hash, self._token_probe
        record = partial(self._feed.publish_weights, version, location, hash_, self._vocabulary, probe)
        await publish_with_retries(self._service, drain_s, "publish the policy", record)
