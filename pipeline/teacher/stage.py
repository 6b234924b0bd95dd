"""The teacher stage: for each group, arrays to TEACHER and a pointer to them to EVENTS.

Each environment has one teacher, the server of one role; several environments may share it. A sequence that the
teacher's server refuses stays missing and does not affect the others; if the server is down, the stage waits. A teacher
with another tokenizer is refused for the whole group, since its logprobs belong to other tokens, unless
`teacher.tokenizers` lets it score the same text in its own tokens.
"""

from contextlib import AsyncExitStack
from functools import partial

import anyio.to_thread
import msgspec

from lachesis.pipeline.inference.directory import SLOW_SERVER_CURE, InferenceDirectory, open_role
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stateless import StatelessStage, StoredRollout, run_stateless
from lachesis.pipeline.teacher.prompt import PromptTemplate
from lachesis.pipeline.teacher.requests import Teacher, TeacherAnswer
from lachesis.pipeline.teacher.retokenize import Retokenizer
from lachesis.pipeline.teacher.settings import TeacherServer, TeacherSettings
from lachesis.pipeline.telemetry.messages import message_name, publish_attributes
from lachesis.pipeline.telemetry.recorder import traced
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Stamp, TeacherEvent, TeacherLogprobs, TeacherPointer
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.planning_header import ROLLOUT_HEADER

__all__ = ["run_teacher"]


def _say_slow(service: Service, role: str, text: str | None, all_slow: bool) -> None:
    mend, held_up = SLOW_SERVER_CURE, ["batcher", "trainer"]
    service.set_problem(f"slow server {role}", text, mend=mend, held_up=held_up, stops=all_slow)


def _say_other(service: Service, role: str, text: str | None) -> None:
    service.set_problem(f"other server {role}", text, held_up=["batcher", "trainer"], stops=True)


async def run_teacher(service: Service, settings: TeacherSettings) -> None:
    """Run one replica of the teacher stage until the service drains.

    Raises `ConfigError` where tokenizers are to be aligned and cannot be loaded, or are not those of the servers.
    """
    async with AsyncExitStack() as stack:
        teachers: dict[str, Teacher] = {}
        for role, server in settings.servers.items():
            directory = await stack.enter_async_context(
                open_role(
                    service.bus,
                    service.run,
                    role,
                    url=server.access.url,
                    key=server.access.key(),
                    requested=service.requested,
                    report_slow=partial(_say_slow, service, role),
                )
            )
            found = await _probe(service, settings, server, directory)
            if found is None:
                return
            teachers[role] = found
        stage = _TeacherStage(service, settings, teachers)
        await run_stateless(
            service,
            StatelessStage(
                kind="teacher",
                handle=stage.handle,
                event=stage.event,
                stamp=_stamped,
                concurrency=settings.config.concurrency,
            ),
        )


async def _probe(
    service: Service, settings: TeacherSettings, server: TeacherServer, directory: InferenceDirectory
) -> Teacher | None:
    """Return the teacher behind `server`; None if the service drains before it answers."""
    found, role = None, server.access.role
    async with service.until_drained():
        async for attempt in service.retrying(f"probe the {role}"):
            with attempt:
                found = await (await directory.current()).probe()
    if found is None:
        return None
    directory.guard.hold_to(found.model, found.tokenizer_hash)
    directory.guard.report = partial(_say_other, service, role)
    prompt = None if settings.config.prompt is None else PromptTemplate(settings.config.prompt)
    top_k = settings.config.top_k
    teacher = Teacher(directory, found.model, found.tokenizer_hash, top_k, prompt, branches=found.branches)
    if settings.config.tokenizers == "align":
        load = partial(_load_retokenizer, settings, server, found.tokenizer_hash)
        teacher.student_hash, teacher.retokenizer = await anyio.to_thread.run_sync(load)
    return teacher


def _load_retokenizer(
    settings: TeacherSettings, server: TeacherServer, served: str | None
) -> tuple[str, Retokenizer | None]:
    """Return the hash of the policy's tokenizer, and what aligns the teacher's with it; None: they are the same."""
    from lachesis.pipeline.model.pretrained_tokenizer import load_tokenizer  # torch, which no other teacher needs
    from lachesis.pipeline.model.tokenizer import tokenizer_hash

    role, sources = server.access.role, (settings.policy_tokenizer, server.tokenizer)
    names, templates = zip(*sources, strict=True)
    for name, setting in zip(names, ("tokenizer", f"inference.{role}.tokenizer"), strict=True):
        if name is None:
            raise ConfigError(f"{setting}: not set, and neither is a model; tokenizers to be aligned must be named")
    student, teacher = map(load_tokenizer, map(str, names), templates)
    hashes = tokenizer_hash(student), tokenizer_hash(teacher)
    if served not in {None, hashes[1]}:
        raise ConfigError(
            f"inference.{role}: its server has tokenizer {str(served)[:12]}, and {names[1]} is {hashes[1][:12]}; set "
            f"inference.{role}.tokenizer to the server's"
        )
    if hashes[0] == hashes[1]:
        return hashes[0], None
    return hashes[0], Retokenizer(student, teacher, names=(str(names[0]), str(names[1])))


class _TeacherStage:
    def __init__(self, service: Service, settings: TeacherSettings, teachers: dict[str, Teacher]) -> None:
        self.service = service
        self.config = settings.config
        self.teachers = teachers

    def event(self, env: str, groups: list[TeacherPointer]) -> TeacherEvent:
        name = self.teachers[self.config.role_of(env)].name
        return TeacherEvent(run=self.service.run, env=env, revision=self.service.revision, teacher=name, groups=groups)

    async def handle(self, rollout: StoredRollout) -> TeacherPointer:
        """Store the group's teacher logprobs and return where they are."""
        group = rollout.group
        teacher = self.teachers[self.config.role_of(group.env)]
        if (refusal := teacher.refusal(group)) is not None:
            return TeacherPointer(group=group.id, seq=rollout.seq, stored=None, reason=refusal)
        about = {"gen_ai.operation.name": "prompt_logprobs", "gen_ai.request.model": teacher.name}
        with traced(f"prompt_logprobs {teacher.name}", "client", about) as found:
            answer = await teacher.score(group)
            found["gen_ai.usage.input_tokens"] = answer.requested_tokens
        stored = await self._store(rollout, teacher.name, answer)
        return TeacherPointer(
            group=group.id, seq=rollout.seq, stored=stored, missing=answer.missing, reason=answer.reason
        )

    async def _store(self, rollout: StoredRollout, name: str, answer: TeacherAnswer) -> int:
        group = rollout.group
        arrays = TeacherLogprobs(
            run=group.run,
            env=group.env,
            group=group.id,
            teacher=name,
            tokenizer_hash=group.tokenizer_hash,
            temperature=1.0,
            weights=answer.weights,
            prompt_digest=answer.prompt_digest,
            **answer.columns,
        )
        subject = subjects.logprobs(group.run, self.service.revision, group.env)
        # by sequence, not by group: those of an earlier copy may have been trimmed with it
        msg_id = f"logprobs.{self.service.revision}.{rollout.seq}"
        headers = {ROLLOUT_HEADER: str(rollout.seq)}
        data, bus = encode(arrays.without_repeats(answer.repeats)), self.service.bus
        with traced(
            f"publish {message_name(subject)}", "client", publish_attributes(subject, bus.server, len(data))
        ) as found:
            ack = await bus.publish_large(subject, data, msg_id=msg_id, headers=headers)
            found["messaging.message.id"] = f"{ack.stream}:{ack.seq}"
        return ack.seq


def _stamped(item: TeacherPointer, times: Stamp) -> TeacherPointer:
    return msgspec.structs.replace(item, stamps=[times])
