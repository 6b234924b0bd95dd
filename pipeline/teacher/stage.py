"""The teacher stage: rollout groups in, the arrays to TEACHER and a pointer to them to EVENTS.

A sequence that the teacher's server refuses stays missing and leaves the others in place; a server that is down is
waited for. A teacher of another tokenizer is refused for the whole group, since its logprobs belong to other tokens.
"""

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.inference.client import Capabilities
from lachesis.pipeline.inference.directory import InferenceDirectory, open_role, sampling_key
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stateless import StatelessStage, StoredRollout, run_stateless
from lachesis.pipeline.teacher.logic import group_logprobs
from lachesis.pipeline.telemetry.messages import message_name, publish_attributes
from lachesis.pipeline.telemetry.recorder import traced
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Stamp, TeacherEvent, TeacherLogprobs, TeacherPointer
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import DataError, InfrastructureError
from lachesis.schemas.plan import ROLLOUT_HEADER
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["run_teacher"]


async def run_teacher(service: Service, config: RunConfig) -> None:
    """Run one replica of the teacher stage until the service drains."""
    async with open_role(
        service.bus,
        config.run,
        "teacher",
        url=config.role("teacher").url,
        key=sampling_key(config, "teacher"),
        requested=service.requested,
    ) as directory:
        capabilities: Capabilities | None = None
        async with service.until_drained():
            async for attempt in service.retrying("probe the teacher"):
                with attempt:
                    capabilities = await (await directory.current()).probe()
        if capabilities is None:
            return
        teacher = _Teacher(service, directory, capabilities.model, capabilities.tokenizer_hash)
        await run_stateless(
            service,
            StatelessStage(
                kind="teacher",
                handle=teacher.handle,
                event=teacher.event,
                stamp=_stamped,
                concurrency=config.teacher.concurrency,
            ),
        )


class _Teacher:
    def __init__(self, service: Service, directory: InferenceDirectory, name: str, tokenizer_hash: str | None) -> None:
        self.service = service
        self.directory = directory
        self.name = name
        self.tokenizer_hash = tokenizer_hash

    def event(self, env: str, groups: list[TeacherPointer]) -> TeacherEvent:
        return TeacherEvent(
            run=self.service.run, env=env, revision=self.service.revision, teacher=self.name, groups=groups
        )

    async def handle(self, rollout: StoredRollout) -> TeacherPointer:
        """Store the group's teacher logprobs and return where they are."""
        group = rollout.group
        if self.tokenizer_hash not in {None, group.tokenizer_hash}:
            refusal = f"the teacher's tokenizer {str(self.tokenizer_hash)[:12]} is not {group.tokenizer_hash[:12]}"
            return TeacherPointer(group=group.id, seq=rollout.seq, stored=None, reason=refusal)
        about = {"gen_ai.operation.name": "prompt_logprobs", "gen_ai.request.model": self.name}
        with traced(f"prompt_logprobs {self.name}", "client", about) as found:
            answers, reason = await self._request_logprobs(group)
            found["gen_ai.usage.input_tokens"] = group.sequences.n_tokens
        logprobs, missing = group_logprobs(group, answers)
        arrays = TeacherLogprobs(
            run=group.run,
            env=group.env,
            group=group.id,
            teacher=self.name,
            tokenizer_hash=group.tokenizer_hash,
            temperature=1.0,
            logprobs=logprobs,
            missing=missing,
        )
        subject = subjects.logprobs(group.run, self.service.revision, group.env)
        # by sequence, not by group: those of an earlier copy may have been trimmed with it
        msg_id = f"logprobs.{self.service.revision}.{rollout.seq}"
        headers = {ROLLOUT_HEADER: str(rollout.seq)}
        data, bus = encode(arrays), self.service.bus
        with traced(
            f"publish {message_name(subject)}", "client", publish_attributes(subject, bus.server, len(data))
        ) as found:
            ack = await bus.publish_large(subject, data, msg_id=msg_id, headers=headers)
            found["messaging.message.id"] = f"{ack.stream}:{ack.seq}"
        return TeacherPointer(group=group.id, seq=rollout.seq, stored=ack.seq, missing=missing, reason=reason)

    async def _request_logprobs(self, group: RolloutGroup) -> tuple[list[NDArray[np.float32] | None], str | None]:
        """Return each sequence's logprobs, None where the server refused it, and the last refusal.

        Equal sequences, of which a group of short answers has many, are asked about once.
        """
        client = await self.directory.current()
        answers: list[NDArray[np.float32] | None] = [None] * len(group.sequences)
        reason: str | None = None
        down: InfrastructureError | None = None

        async def ask(tokens: NDArray[np.int32], places: list[int]) -> None:
            nonlocal reason, down
            try:
                answer = await client.prompt_logprobs(tokens.tolist())
            except DataError as error:
                reason = str(error)
            except InfrastructureError as error:  # raised below, alone: a task group would wrap it
                down = error
            else:
                if answer.shape == tokens.shape and np.isfinite(answer).all():
                    for i in places:
                        answers[i] = answer
                else:
                    reason = f"{answer.shape} logprobs, finite or not, for {len(tokens)} tokens"

        alike: dict[bytes, tuple[NDArray[np.int32], list[int]]] = {}
        for i, sequence in enumerate(group.sequences):
            alike.setdefault(sequence.tokens.tobytes(), (sequence.tokens, []))[1].append(i)
        async with anyio.create_task_group() as tasks:
            for tokens, places in alike.values():
                tasks.start_soon(ask, tokens, places)
        if down is not None:
            raise down
        return answers, reason


def _stamped(item: TeacherPointer, times: Stamp) -> TeacherPointer:
    return msgspec.structs.replace(item, stamps=[times])
