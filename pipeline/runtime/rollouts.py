"""Reads a rollout group as stored, without trusting its sender."""

from dataclasses import dataclass

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.routing import BROKEN_HEADER
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["StoredRollout", "read_rollout"]

_MAX_TEXT_CHARS = 500


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A rollout group as stored: `seq` is its sequence in ROLLOUTS, `stored_ns` the server's time of storing it."""

    group: RolloutGroup
    seq: int
    stored_ns: int


def read_rollout(message: StoredMessage) -> StoredRollout:
    """Return the group that `message` holds.

    Raises `SchemaError` when it cannot be read, or if subject, planning header and body do not name the same group:
    others plan by the header alone, and what a stage derives is stored under the body's names.
    """
    broken = message.headers.get(BROKEN_HEADER)
    if broken is not None:  # the data is the head of a large message that could not be put together
        raise SchemaError(broken[:_MAX_TEXT_CHARS])
    group = decode(RolloutGroup, message.data)
    if message.subject != subjects.rollout(group.run, group.env):
        raise SchemaError(f"run, env: {group.run[:40]!r} and {group.env[:40]!r} are not those of {message.subject}")
    header, plan = message.headers.get(PLAN_HEADER), Plan.of(group)
    if header != plan.pack() and (other := Plan.unpack(header)) != plan:
        raise SchemaError(f"header {PLAN_HEADER}: it is that of {other}, and the message holds {plan}")
    return StoredRollout(group, message.seq, message.time_ns)
