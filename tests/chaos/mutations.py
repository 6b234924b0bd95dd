"""The pipeline broken on purpose, to see that the audit tells: small patches, made in child processes only.

`PATCHES` are by name what `child/sitecustomize.py` applies before a process begins. A `Mutation` is one of them with
strikes that make it hurt, and the checks of the audit of which one must then fail; under the same strikes and
conditions without the patch, nothing may.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
from chaos.schedule import CONNECTION, Action, Strike

__all__ = ["MUTATIONS", "PATCHES", "SMALL_CHUNK_BYTES", "Mutation"]

SMALL_CHUNK_BYTES = 512


# Conditions: what the pipeline must stand


def slow_scorer() -> None:
    """A group takes a second to be scored."""
    _scoring_takes(1.0)


def very_slow_scorer() -> None:
    """A group takes three seconds to be scored."""
    _scoring_takes(3.0)


def _scoring_takes(seconds: float) -> None:
    from lachesis.pipeline.scorer.stage import EnvironmentScorer

    score = EnvironmentScorer.score

    async def slowly(self: Any, *arguments: Any, **named: Any) -> Any:
        await anyio.sleep(seconds)
        return await score(self, *arguments, **named)

    EnvironmentScorer.score = slowly  # type: ignore[method-assign]


def impatient_broker() -> None:
    """What is not acknowledged within a second is delivered again."""
    _consumers_with({"ack_wait": 1_000_000_000})


def small_chunks() -> None:
    """Every rollout is a large message: chunks and a head."""
    from lachesis.pipeline.bus import blobs, direct_get, jetstream

    for module in (blobs, direct_get, jetstream):
        module.INLINE_BYTES = SMALL_CHUNK_BYTES  # type: ignore[attr-defined]
    blobs.CHUNK_BYTES = SMALL_CHUNK_BYTES  # type: ignore[misc]


# Mutations: what the audit must notice


def ack_before_commit() -> None:
    """A stateless stage acknowledges a group as soon as it takes it up."""
    from lachesis.pipeline.runtime.stateless import _Replica

    handle = _Replica._handle

    async def early(self: Any, delivery: Any, start_ns: int) -> Any:
        await delivery.ack()
        return await handle(self, delivery, start_ns)

    _Replica._handle = early  # type: ignore[method-assign]


def no_fence() -> None:
    """Single writers write whatever others wrote meanwhile."""
    from lachesis.pipeline.bus.publisher import Publisher

    async def commit(
        self: Publisher, stream: str, subject: str, data: bytes, *, expected: int, headers: Mapping[str, str]
    ) -> int:
        return (await self.store(subject, data, headers)).seq

    Publisher.commit = commit  # type: ignore[method-assign]


def no_message_id() -> None:
    """Every attempt to publish has an id of its own, so a retry is stored again."""
    from lachesis.pipeline.bus.acknowledged import AcknowledgedEnds
    from lachesis.pipeline.bus.routing import MSG_ID_HEADER
    from lachesis.pipeline.bus.server_link import ServerLink

    post, record = ServerLink.post, AcknowledgedEnds.record
    sent: ContextVar[str] = ContextVar("sent")

    async def anew(self: ServerLink, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> Any:
        if headers and MSG_ID_HEADER in headers:
            sent.set(uuid.uuid4().hex)
            headers = {**headers, MSG_ID_HEADER: sent.get()}
        return await post(self, subject, data, headers)

    def record_sent(self: AcknowledgedEnds, ack: Any, msg_id: str, *, after: int) -> None:
        record(self, ack, sent.get(), after=after)

    ServerLink.post = anew  # type: ignore[method-assign]
    AcknowledgedEnds.record = record_sent  # type: ignore[method-assign]


def max_deliver_5() -> None:
    """The broker stops delivering a message after five times."""
    _consumers_with({"max_deliver": 5})


def trim_by_age() -> None:
    """The governor deletes rollouts two seconds old, even if they are still needed."""
    from lachesis.pipeline.governor.stage import _Follower
    from lachesis.schemas import subjects

    streams = _Follower.streams

    async def trim(self: Any) -> None:
        filters = [subjects.rollout(self.service.run)]
        while True:
            old = 0
            async with self.service.bus.read(subjects.ROLLOUTS, filters, headers_only=True, follow=False) as messages:
                async for message in messages:
                    old = message.seq if message.time_ns < time.time_ns() - 2_000_000_000 else old
            await self.service.bus.trim(subjects.ROLLOUTS, filters, before=old + 1)
            await anyio.sleep(0.5)

    async def both(self: Any) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trim, self)
            await streams(self)

    _Follower.streams = both  # type: ignore[method-assign]


def lag_as_outcome() -> None:
    """The governor counts a rollout as done once it was delivered, as a bound on consumer lag would."""
    from lachesis.pipeline.governor.logic import Governor

    Governor.outstanding = property(lambda self: self.leased)  # type: ignore[assignment, method-assign]


def _consumers_with(changes: Mapping[str, object]) -> None:
    from lachesis.pipeline.bus import consumers

    consume = consumers.consume

    class Changed:
        def __init__(self, link: Any) -> None:
            self._link = link

        def __getattr__(self, name: str) -> Any:
            return getattr(self._link, name)

        async def call_api(self, kind: Any, subject: str, request: bytes, **rest: Any) -> Any:
            if ".CONSUMER.CREATE." in subject:
                asked = json.loads(request)
                asked["config"] |= changes
                request = json.dumps(asked).encode()
            return await self._link.call_api(kind, subject, request, **rest)

    @asynccontextmanager
    async def changed(link: Any, *arguments: Any, **rest: Any) -> AsyncIterator[Any]:
        async with consume(Changed(link), *arguments, **rest) as deliveries:  # type: ignore[arg-type]
            yield deliveries

    consumers.consume = changed  # type: ignore[assignment]


PATCHES: dict[str, Callable[[], None]] = {
    patch.__name__: patch
    for patch in (
        slow_scorer,
        very_slow_scorer,
        impatient_broker,
        small_chunks,
        ack_before_commit,
        no_fence,
        no_message_id,
        max_deliver_5,
        trim_by_age,
        lag_as_outcome,
    )
}


def _strikes(
    action: Action, targets: Sequence[str], times: int, *, after_s: float, seconds: float = 1.0, choice: float = 0.1
) -> list[Strike]:
    return [Strike(after_s, action, targets[i % len(targets)], seconds, choice) for i in range(times)]


@dataclass(frozen=True, slots=True)
class Mutation:
    """`patch` is applied with the `conditions`; one of `caught_by` must then find something."""

    patch: str
    caught_by: frozenset[str]
    strikes: Sequence[Strike]
    conditions: Sequence[str] = ()
    servers: Literal["supervised", "standalone"] = "supervised"
    sets: Mapping[str, object] = field(default_factory=dict)


MUTATIONS = {
    mutation.patch: mutation
    for mutation in (
        Mutation(
            "ack_before_commit",
            frozenset({"outcomes"}),
            _strikes("kill", ["scorer-1", "scorer-2"], 12, after_s=0.8),
            ["slow_scorer"],
        ),
        Mutation(
            "no_fence",
            frozenset({"chain", "normalizer", "curriculum", "outcomes", "manifests"}),
            _strikes("duplicate", ["batcher", "normalizer", "curriculum"], 6, after_s=2.0, seconds=4.0, choice=0.9),
        ),
        Mutation(
            "no_message_id",
            frozenset({"stored once"}),
            _strikes("silence", [CONNECTION], 15, after_s=1.5, seconds=0.5),
            servers="standalone",
        ),
        Mutation(
            "max_deliver_5",
            frozenset({"outcomes"}),
            _strikes("kill", ["scorer-1", "scorer-2"], 14, after_s=1.2),
            ["very_slow_scorer", "impatient_broker"],
        ),
        Mutation(
            "trim_by_age",
            frozenset({"kept"}),
            _strikes("freeze", ["trainer"], 3, after_s=1.0, seconds=5.0),
        ),
        Mutation(
            "lag_as_outcome",
            frozenset({"bound"}),
            _strikes("freeze", ["trainer"], 3, after_s=1.0, seconds=5.0),
        ),
    )
}
