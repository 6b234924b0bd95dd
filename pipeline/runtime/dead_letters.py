"""Writes dead letters: records of messages that cannot be handled.

The message itself stays where it is stored.
"""

import time

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadKind, DeadLetter
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.planning_header import PLAN_HEADER, Plan

__all__ = ["REQUEUED_HEADER", "count_dead", "dead_letter", "dead_letter_at", "publish_dead_letter", "store_dead_letter"]

REQUEUED_HEADER = "Lachesis-Requeued"
"""Header of a message that repeats a dead-lettered one, after a fix: `<stream>.<sequence>` of the one it repeats."""

_MAX_REASON_CHARS = 2000
_DEAD_LETTER_NOTICE_S = 60.0
"""Seconds for which a heartbeat names the last dead letter."""


def dead_letter(
    service: Service,
    message: StoredMessage,
    kind: DeadKind,
    error: Exception,
    *,
    attempts: int = 1,
) -> DeadLetter:
    """Return the dead letter of `message`.

    The environment is that of its subject, the group that of its plan.
    """
    try:
        plan = Plan.unpack(message.headers.get(PLAN_HEADER))
    except SchemaError:
        plan = None
    env, reason = message.subject.rsplit(".", 1)[-1], error_text(error)
    return dead_letter_at(
        service, message.stream, message.seq, env=env, plan=plan, kind=kind, reason=reason, attempts=attempts
    )


def dead_letter_at(
    service: Service,
    stream: str,
    seq: int,
    *,
    env: str,
    plan: Plan | None,
    kind: DeadKind,
    reason: str,
    attempts: int = 1,
) -> DeadLetter:
    """Return the dead letter of the message at sequence `seq` of `stream`, which need not be at hand.

    `plan`: that of its group, None if it is not known.
    """
    group = plan.group if plan is not None else None
    return DeadLetter(
        run=service.run,
        env=env,
        revision=service.revision,
        stage=service.name,
        kind=kind,
        stream=stream,
        seq=seq,
        group=group,
        reason=reason[:_MAX_REASON_CHARS],
        place=f"{service.name} {service.instance}",
        time_ns=time.time_ns(),
        trace_id=group,
        attempts=attempts,
        leased=plan is not None and plan.lease is not None,
    )


async def publish_dead_letter(service: Service, letter: DeadLetter) -> None:
    """Store a dead letter.

    A second one for the same message, stage and revision is dropped as a duplicate.
    """
    subject = subjects.event("dead", letter.run, letter.revision, letter.env)
    msg_id = f"dead.{letter.revision}.{letter.stage}.{letter.stream}.{letter.seq}"
    await service.bus.publish(subject, encode(letter), msg_id=msg_id)


async def store_dead_letter(service: Service, letter: DeadLetter) -> None:
    """Store a dead letter as soon as the broker takes it, and count it.

    Raises `InfrastructureError` once the service drains.
    """
    await service.retrying("publish a dead letter")(publish_dead_letter, service, letter)
    count_dead(service, letter)


def count_dead(service: Service, letter: DeadLetter) -> None:
    """Count a dead letter that was stored, and say for a while what was given up."""
    service.vitals.dead += 1
    service.set_problem(
        "dead letters",
        f"{service.vitals.dead} messages were given up since {service.name} started, the last one of {letter.env}",
        why=letter.reason,
        mend="`lachesis dead` lists them",
        for_s=_DEAD_LETTER_NOTICE_S,
    )
