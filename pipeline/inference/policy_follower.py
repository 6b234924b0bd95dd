"""Loads new policy versions into an inference server; of several only the newest.

Works with any server that speaks vLLM's weight-update routes. Of weights in files the trainer never waits for it; of
those in shared memory it changes none before the server has the last ones.
"""

import logging
from pathlib import Path

import anyio

from lachesis.pipeline.inference.directory import InferenceDirectory
from lachesis.pipeline.inference.weight_traces import traced_update
from lachesis.pipeline.inference.weights_turn import take_turn
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import keys
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import AccessError, DataError, InfrastructureError, SchemaError, VersionError

__all__ = ["follow_policy"]

log = logging.getLogger("lachesis")


async def follow_policy(
    service: Service, directory: InferenceDirectory, loaded: anyio.Event, trainer: str, *, shared: Path | None = None
) -> None:
    """Load each new policy record into the directory's server until cancelled.

    Set `loaded` after the first.

    `trainer` is who makes them: each update is a span of the step that made the weights. `shared`: the pointer to the
    trainer's segment, where the weights are in shared memory and not in the record's file.
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
                            if shared is None:
                                await client.update_weights(record.weights, record.version)
                            else:
                                with await take_turn(shared.parent):
                                    await client.update_weights(str(shared), record.version)
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
