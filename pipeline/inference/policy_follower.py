"""Loads new policy versions into an inference server; of several only the newest.

Works with any server that speaks vLLM's weight-update routes; the trainer never waits for it.
"""

import logging

import anyio

from lachesis.pipeline.inference.directory import InferenceDirectory
from lachesis.pipeline.inference.weight_traces import traced_update
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import keys
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import AccessError, DataError, InfrastructureError, SchemaError, VersionError

__all__ = ["follow_policy"]

log = logging.getLogger("lachesis")


async def follow_policy(service: Service, directory: InferenceDirectory, loaded: anyio.Event, trainer: str) -> None:
    """Load each new policy record into the directory's server until cancelled.

    Set `loaded` after the first.

    `trainer` is who makes them: each update is a span of the step that made the weights.
    """
    async with service.bus.watch(keys.POLICY) as entries:
        async for entry in entries:
            try:
                record = decode(PolicyRecord, entry.value)
            except VersionError:
                raise  # passing over it would be generating with ever older weights
            except SchemaError as error:
                log.warning("a policy record cannot be read: %s", error)
                continue
            try:
                with traced_update(service, trainer, record.policy_version):
                    async for attempt in service.retrying(f"load weights {record.version}"):
                        with attempt:
                            client = await directory.current()
                            await client.update_weights(record.weights, record.version)
            except InfrastructureError:
                return  # draining
            except (AccessError, DataError) as error:
                # Refused: pruned while we were away, or torn. The server goes on with the weights it has, under their
                # own version, and a newer record follows.
                log.warning("policy %s was refused: %s", record.version, error)
                service.set_note("policy", f"policy {record.version} was refused: {error}")
                continue
            service.mark_ok()
            service.set_note("policy", None)
            loaded.set()
            service.vitals.metrics["policy/step"] = record.policy_version.step
