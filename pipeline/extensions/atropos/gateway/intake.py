"""Stores the rollouts in request bodies: converts, recognises repeats, gets leases, publishes.

Guarantees: a group answered with success is stored; a group that is sent again (its client saw no answer, or the
gateway died), however late within the horizon of `KnownPosts`, is stored once; nothing is published without a lease,
for which the request waits; and the bytes of waiting groups are bounded for each environment.
"""

import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec

from lachesis.pipeline.bus.api import PubAck
from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.environment.leases import ProducerLeases
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.extensions.atropos.gateway.known_posts import KnownPosts
from lachesis.pipeline.extensions.atropos.gateway.lease_queue import LeaseQueue
from lachesis.pipeline.extensions.atropos.gateway.logic.buffer import Buffer, PartialGroup
from lachesis.pipeline.extensions.atropos.gateway.logic.registry import Registration
from lachesis.pipeline.extensions.atropos.gateway.server_identity import ServerIdentity
from lachesis.pipeline.extensions.atropos.gateway.settings import GatewaySettings
from lachesis.pipeline.extensions.atropos.gateway.store import GatewayStore
from lachesis.pipeline.extensions.atropos.logic.scored_data import ScoredData, read_scored_data, split_list
from lachesis.pipeline.extensions.atropos.logic.scored_groups import GroupOrigin, to_group
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.messages import publish_span
from lachesis.pipeline.telemetry.spans import Span, SpanLink, Times, generate_span, root_id, span_id
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import DataError, SchemaError
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.planning_header import PLAN_HEADER, TRACEPARENT_HEADER, Plan, traceparent
from lachesis.schemas.rollout import PackedGroup, RolloutGroup
from lachesis.schemas.sequences import TEACHER_COLUMN

__all__ = ["BusyError", "Intake", "IntakeGroup"]

log = logging.getLogger("lachesis")

_MAX_REMEMBERED_DIGESTS = 8192
"""Answers kept for clients that send a group again; for older ones only the fact that they are stored is known."""
_LEASE_SLACK = 1024
"""Bytes by which a group may grow when it gets its lease and its counter."""
_MAX_EXAMPLE_BYTES = 1 << 20
_MAX_INLINE_BYTES = 1 << 20
"""Bytes of a body that is converted in the event loop, for about 5 ms at most. A thread would spare the loop little,
because it holds the interpreter for most of that time, and takes as long as a tenth of it to start and to wake."""
_GIVE_BACK_S = 2.0
"""Seconds that a drain waits at most for leases to be given back."""

Answer = dict[str, Any]
R = TypeVar("R")


class BusyError(InfrastructureError):
    """Raised when a group cannot be taken now: send it again later."""


class IntakeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a request, its texts packed: `digest` names its bytes as they came, `size` is that of the encoded
    group, bytes, `posted` how many sequences came, `owner` its client if that registered, `caller` the span that sent
    it if that said so.
    """

    env: str
    owner: int | None
    digest: str
    group: RolloutGroup
    size: int
    posted: int
    caller: SpanLink | None = None


class Intake:
    """Takes groups for the environments of kind gateway. Run `renew` in a task beside it."""

    def __init__(
        self,
        service: Service,
        settings: GatewaySettings,
        store: GatewayStore,
        identity: ServerIdentity,
        posts: KnownPosts,
    ) -> None:
        self._service = service
        self._settings = settings
        self._store = store
        self._policies = identity.policies
        self._posts = posts
        self._identity = identity
        self._epoch = time.time_ns()
        self._counter = 0
        self.envs = settings.foreign
        self._leases = {name: ProducerLeases(service, self._producer(name), name) for name in self.envs}
        self._queues = {
            name: LeaseQueue(leases, identity.policies, service.draining) for name, leases in self._leases.items()
        }
        self._locks = {name: anyio.Lock() for name in self.envs}
        self._converting = anyio.CapacityLimiter(1)
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._under_way: dict[str, anyio.Event] = {}
        self._callers: dict[str, SpanLink] = {}
        self._held_bytes: Counter[str] = Counter()
        self.held_sequences: Counter[str] = Counter()
        self.latest: ScoredData | None = None
        self._example: ScoredData | None = None
        self.duplicates = 0
        self._too_long: Counter[str] = Counter()
        """By environment, samples that were left out."""
        self._named_unused: set[tuple[str, str]] = set()

    def _producer(self, env: str) -> str:
        return f"gateway-{env}-{self._service.replica}"

    def waiting_sequences(self, asking: str | None) -> int:
        """Return the sequences of an environment that are held here or in buffers; None: those of all.

        Sequences of others do not concern an environment: it has a share of its own. In the sum over all, a closed
        environment does not count: its sequences are not trained on.
        """
        envs = [env for env, leases in self._leases.items() if env == asking or (not asking and not leases.is_closed)]
        buffered = sum(partial.sequences for env in envs for partial in self._store.buffers[env].waiting)
        return buffered + sum(self.held_sequences[env] for env in envs)

    def is_waiting(self, env: str) -> bool:
        """Return whether groups or clients of an environment wait for a lease."""
        return self._queues[env].is_waiting

    def generating_sequences(self) -> int:
        """Return the sequences that clients have leases for and generate now."""
        return sum(queue.unused_sequences for queue in self._queues.values())

    async def give_back_overdue(self, silent: Callable[[str], bool]) -> None:
        """Give back leases whose groups do not come; `silent` says of which environments nothing is heard."""
        for env, queue in self._queues.items():
            await queue.give_back_overdue(silent=silent(env))

    async def give_back_all(self) -> None:
        """Give back all leases of groups that clients generate now, which they send to the next gateway.

        That one requests leases for them; what is not given back in time expires.
        """
        with anyio.move_on_after(_GIVE_BACK_S):
            async with anyio.create_task_group() as tasks:
                for queue in self._queues.values():
                    tasks.start_soon(queue.give_back_all)

    async def renew(self) -> None:
        """Keep the leases of groups that are generated or published. Runs until cancelled."""
        async with anyio.create_task_group() as tasks:
            for env, leases in self._leases.items():
                tasks.start_soon(leases.renew)
                tasks.start_soon(self._queues[env].end_on_drain)

    async def convert_groups(self, body: bytes, *, several: bool, caller: SpanLink | None = None) -> list[IntakeGroup]:
        """Return the groups of a body, converted.

        Raises `DataError`, which says what is wrong with the first bad one.
        """
        arrived_ns = self._service.now_ns()
        parsed = await self._compute(len(body), _parse, body, several)
        observed = await self._tokenizer_hash()
        origins = [self._origin(data, arrived_ns, observed) for _, data in parsed]
        items = await self._compute(len(body), _convert, parsed, origins, caller)
        for item in items:
            self._name_unused(item.env, item.group)
        if parsed and len(body) <= _MAX_EXAMPLE_BYTES:
            self._example = parsed[-1][1]
        return items

    async def _compute(self, size: int, function: Callable[..., R], *args: Any) -> R:
        """Return `function(*args)`, which reads a body of `size` bytes; in a thread if it is large."""
        if size <= _MAX_INLINE_BYTES:
            return function(*args)
        return await anyio.to_thread.run_sync(function, *args, limiter=self._converting)

    def _name_unused(self, env: str, group: RolloutGroup) -> None:
        """Warn, once for each environment, about fields that it sends and that are not used."""
        unused = [
            f"{name} are ignored: the trainer computes them" for name in group.metadata["gateway"].get("ignored", ())
        ]
        if self._settings.teacher_coef == 0 and TEACHER_COLUMN in group.sequences.columns:
            unused.append("distill_logprobs are stored and change nothing: training.learner.loss.teacher_coef is 0")
        for text in unused:
            if (env, text) not in self._named_unused:
                self._named_unused.add((env, text))
                log.warning("environment %s: its %s", env, text)

    async def store(self, items: list[IntakeGroup], is_gone: Callable[[], Awaitable[bool]]) -> list[Answer]:
        """Store every group, and return the answers once the client may generate its next group.

        A client that `is_gone` gets no lease for that. Raises `BusyError` when they cannot all be stored in time; those
        that were are recognised when they come again. Empties `items`, so that a client that waits holds no memory.
        """
        answers: list[Answer] = []
        with anyio.move_on_after(self._settings.http.hold_s) as patience:
            with self._holding(items):
                answers = [await self._once(item) for item in items]
            self.latest = self._example
            following = self._following(items, answers)
            items.clear()
            for env, (owner, sequences) in following.items():
                await self._queues[env].wait_for_next(owner, sequences, is_gone)
        if patience.cancelled_caught and items:
            raise BusyError(
                f"the governor granted no lease in {self._settings.http.hold_s:g} s, so the group was not taken: "
                f"{self._service.vitals.status_text or 'the trainer has to catch up'}"
            )
        return answers

    def _following(self, items: list[IntakeGroup], answers: list[Answer]) -> dict[str, tuple[int | None, int]]:
        """Return, for each environment of stored `items`, the client and the size of the group that it makes next."""
        found = {}
        for item, answer in zip(items, answers, strict=True):
            if not answer.get("buffer_size"):
                registered = self._registered(item.owner)
                size = item.posted if registered is None else registered.request.group_size
                found[item.env] = (item.owner, size)
        return found

    async def release(self, owner: int, env: str) -> None:
        """Publish the buffered groups that wait for groups that will not come, and give back unused leases.

        Raises `BusyError`.
        """
        await self._queues[env].give_back(owner)
        with anyio.move_on_after(self._settings.http.hold_s):
            async with self._locks[env]:
                for partial in self._store.buffers[env].of(owner):
                    await self._publish_partials(env, [partial])
            return
        raise BusyError("the governor granted no lease for what is left in the buffer; disconnect again later")

    async def _tokenizer_hash(self) -> str | None:
        """Return the hash of the tokenizer observed at the policy's server; None if none was observed.

        Raises `BusyError` if it differs from the run's for long.
        """
        with anyio.move_on_after(self._settings.http.hold_s):
            return await self._identity.tokenizer_hash()
        raise BusyError("the policy's server is not the run's, so no group is taken; its notice says how it differs")

    def _origin(self, data: ScoredData, arrived_ns: int, observed: str | None) -> tuple[GroupOrigin, int | None]:
        registered = self._registered(data.env_id)
        env = registered.env if registered else self._only_env(data.env_id)
        made_ns = arrived_ns - int(self._settings.http.generation_s * 1e9)
        policy = self._policies.version_at(made_ns)
        if policy is None:
            raise BusyError("the run has no policy yet: its trainer has not started")
        origin = GroupOrigin(
            id=new_group_id(),
            run=self._service.run,
            env=env,
            producer=self._producer(env),
            epoch=self._epoch,
            counter=0,  # when it is published
            policy_version=policy.version,
            tokenizer_hash=observed or policy.tokenizer_hash,
            started_ns=made_ns,
            name=registered.name if registered else env,
            longest=self.envs[env].longest_tokens,
            most=self._settings.batch_size,
            limits=TrainerLimits.of(policy, self._settings.reads, self._settings.temperature),
        )
        return origin, data.env_id if registered else None

    def _registered(self, number: int | None) -> Registration | None:
        found = None if number is None else self._store.registry.registered.get(number)
        return found if found is not None and found.env in self.envs else None

    def _only_env(self, number: int | None) -> str:
        if len(self.envs) == 1:
            return next(iter(self.envs))
        raise DataError(f"env_id {number}: not registered, and the run has several environments; POST /register-env")

    @contextmanager
    def _holding(self, items: list[IntakeGroup]) -> Iterator[None]:
        """Count the items as held. Raises `BusyError` when their environment holds as much as it may."""
        sizes: Counter[str] = Counter()
        sequences: Counter[str] = Counter()
        for item in items:
            sizes[item.env] += item.size
            sequences[item.env] += len(item.group.sequences)
        part = self._settings.http.held_bytes // len(self.envs)
        for env, size in sizes.items():
            if self._held_bytes[env] and self._held_bytes[env] + size > part:
                raise BusyError(f"{self._held_bytes[env]} bytes of {env} wait already, of {part}: gateway.held_bytes")
        self._held_bytes.update(sizes)
        self.held_sequences.update(sequences)
        self._service.vitals.in_flight += len(items)
        try:
            yield
        finally:
            self._held_bytes.subtract(sizes)
            self.held_sequences.subtract(sequences)
            self._service.vitals.in_flight -= len(items)

    async def _once(self, item: IntakeGroup) -> Answer:
        """Store the item unless it is known; if the same item is under way, wait for it."""
        while item.digest in self._under_way:
            await self._under_way[item.digest].wait()
        known = self._answers.get(item.digest)
        if known is not None:
            self.duplicates += 1
            return known
        if self._is_stored(item.env, item.digest) and item.digest not in self._store.buffers[item.env]:
            self.duplicates += 1
            return {"status": "received"}
        done = self._under_way[item.digest] = anyio.Event()
        if item.caller is not None:
            self._callers[item.group.id] = item.caller
        try:
            answer = self._answers[item.digest] = await self._store_item(item)
        finally:
            self._callers.pop(item.group.id, None)
            del self._under_way[item.digest]
            done.set()
        if len(self._answers) > _MAX_REMEMBERED_DIGESTS:
            self._answers.popitem(last=False)
        return answer

    async def _store_item(self, item: IntakeGroup) -> Answer:
        registered = self._registered(item.owner)
        size = item.posted
        if registered is None or item.owner is None or size >= registered.request.group_size:
            await self._publish(item.env, item.owner, [(item.digest, item.group)], item.size)
            return {"status": "received"}
        async with self._locks[item.env]:
            buffer = self._store.buffers[item.env]
            if item.digest not in buffer:
                if not buffer.has_room(item.size, self._settings.http.buffer_bytes):
                    await self._publish(item.env, item.owner, [(item.digest, item.group)], item.size)
                    return {"status": "received"}
                data = encode(item.group)
                partial = PartialGroup(owner=item.owner, digest=item.digest, sequences=size, data=data)
                buffer = await self._set_buffer(item.env, buffer.plus(partial))
            chosen = buffer.complete(item.owner, registered.request.group_size)
            if chosen:
                await self._publish_partials(item.env, chosen)
            return {"status": "buffered", "buffer_size": self._store.buffers[item.env].sequences(item.owner)}

    async def _publish_partials(self, env: str, chosen: list[PartialGroup]) -> None:
        """Publish groups of the buffer, then remove them. If the gateway dies meanwhile, the next one repeats that
        exactly.
        """
        groups: list[RolloutGroup] = [decode(PackedGroup, partial.data) for partial in chosen]
        if not all(partial.leaving for partial in chosen):
            groups = [self._counted(group) for group in groups]
            chosen = [
                msgspec.structs.replace(partial, leaving=True, data=encode(group))
                for partial, group in zip(chosen, groups, strict=True)
            ]
            await self._set_buffer(env, self._store.buffers[env].replaced(chosen))
        digests = [partial.digest for partial in chosen]
        size = sum(len(partial.data) for partial in chosen)
        await self._publish(env, chosen[0].owner, list(zip(digests, groups, strict=True)), size, counted=True)
        await self._set_buffer(env, self._store.buffers[env].minus(chosen))

    async def _set_buffer(self, env: str, buffer: Buffer) -> Buffer:
        with anyio.CancelScope(shield=True):  # a write given up half-way would leave its revision unknown
            await self._service.retrying("store the buffer")(self._store.set_buffer, env, buffer)
        return buffer

    async def forget(self) -> None:
        """Drop the groups that wait in the buffers, and give back the leases of groups to come."""
        for queue in self._queues.values():
            await queue.give_back_all()
        for env, lock in self._locks.items():
            async with lock:
                await self._set_buffer(env, Buffer())

    async def _publish(
        self, env: str, owner: int | None, groups: list[tuple[str, RolloutGroup]], size: int, *, counted: bool = False
    ) -> None:
        """Publish groups of one client, of `size` bytes, under one lease for all; the last one carries and ends it."""
        leases = self._leases[env]
        sequences = sum(len(group.sequences) for _, group in groups)
        policy_step = max(group.policy_step for _, group in groups)
        lease = await self._queues[env].acquire(owner, sequences, size + len(groups) * _LEASE_SLACK, policy_step)
        if lease is None:
            raise BusyError("the gateway is stopping")
        stored = False
        try:
            for n, (digest, group) in enumerate(groups, 1):
                ready = group if counted else self._counted(group)
                stored = await self._store_group(ready.replace(lease=lease if n == len(groups) else None), digest)
        finally:
            leases.settled(lease)  # renewed no more: it ends with the group that carries it, or runs out
        if not stored:
            await leases.release(lease)

    def _counted(self, group: RolloutGroup) -> RolloutGroup:
        """Return the group with the next counter: as late as can be, for few gaps between those that are stored."""
        self._counter += 1
        return group.replace(epoch=self._epoch, producer=self._producer(group.env), counter=self._counter - 1)

    def _is_stored(self, env: str, digest: str) -> bool:
        return self._posts.is_known(_message_id(self._service.run, env, digest))

    async def _store_group(self, group: RolloutGroup, digest: str) -> bool:
        """Store one group and return whether it is new."""
        if self._is_stored(group.env, digest):  # by a gateway that died before it had taken it out of the buffer
            self.duplicates += 1
            return False
        service, data = self._service, encode(group)
        sampled = service.tracing.sampled(group.id)
        headers = {PLAN_HEADER: Plan.of(group).pack(), TRACEPARENT_HEADER: traceparent(group.id, sampled=sampled)}
        subject = subjects.rollout(group.run, group.env)
        leased_ns = service.now_ns()
        ack: PubAck = await service.retrying(f"publish {subject}")(
            service.bus.publish_large, subject, data, msg_id=_message_id(group.run, group.env, digest), headers=headers
        )
        if sampled and not ack.duplicate:
            service.tracing.emit(self._spans(group, subject, ack, leased_ns, len(data)))
        service.record_call(group.started_ns, len(group.sequences), payload=len(data))
        service.mark_ok()
        service.vitals.handled += 1
        if ack.duplicate:
            self.duplicates += 1
        else:
            service.vitals.emitted += 1
            self._report_too_long(group)
            service.vitals.process.record((service.now_ns() - group.started_ns) / 1e9)
        return not ack.duplicate

    def _report_too_long(self, group: RolloutGroup) -> None:
        """Report samples of a stored group that were left out."""
        left_out = group.metadata.get("failed_samples", [])
        if left_out:
            self._too_long[group.env] += len(left_out)
            count = self._too_long[group.env]
            self._service.set_problem(
                f"{group.env} failed samples",
                f"environment {group.env}: {count} samples were left out because they are too long, the newest: "
                f"{left_out[-1]['error']}; what is trained on lacks such answers",
            )

    def _spans(self, group: RolloutGroup, subject: str, ack: PubAck, leased_ns: int, size: int) -> list[Span]:
        """Return what environment and gateway did for a group, linked to the span of a caller that traces itself."""
        stored_ns = self._service.now_ns()
        arrived_ns = min(group.started_ns + int(self._settings.http.generation_s * 1e9), leased_ns)
        about: dict[str, str | int] = {
            "rl.group.size": len(group.sequences),
            "rl.policy.version": group.policy_versions[0],
        }
        generated = generate_span(group.id, group.env, (group.started_ns, arrived_ns), about)
        caller = self._callers.get(group.id)
        if caller is not None:
            generated = msgspec.structs.replace(generated, links=[caller])
        held = _hold_span(group.id, group.env, (arrived_ns, leased_ns))
        published = publish_span(
            self._service.name, group.id, generated.id, subject, (leased_ns, stored_ns),
            server=self._service.bus.server, message=f"{ack.stream}:{ack.seq}", size=size,
        )  # fmt: skip
        return [generated, held, published]

    def figures(self) -> dict[str, float]:
        """Return figures for the heartbeat."""
        waiting = [partial for buffer in self._store.buffers.values() for partial in buffer.waiting]
        return {
            "gateway/held_sequences": self.held_sequences.total(),
            "gateway/held_bytes": self._held_bytes.total(),
            "gateway/generating_sequences": self.generating_sequences(),
            "gateway/buffered_sequences": sum(partial.sequences for partial in waiting),
            "gateway/duplicates": self.duplicates,
        }


def _message_id(run: str, env: str, digest: str) -> str:
    """Return the id under which a client's group is stored, which `KnownPosts` uses."""
    return f"{subjects.rollout(run, env)}.{digest}"


def _parse(body: bytes, several: bool) -> list[tuple[str, ScoredData]]:
    """Return each group and the digest of its bytes (and of its place: a list may hold the same group twice)."""
    parts = split_list(body) if several else [memoryview(body)]
    found = []
    for n, part in enumerate(parts):
        try:
            data = read_scored_data(part)
        except SchemaError as error:
            raise SchemaError(f"[{n}]: {error}") from error
        digest = hashlib.sha256(b"%d:" % n)
        digest.update(part)
        found.append((digest.hexdigest()[:40], data))
    return found


def _convert(
    parsed: list[tuple[str, ScoredData]], origins: list[tuple[GroupOrigin, int | None]], caller: SpanLink | None
) -> list[IntakeGroup]:
    items = []
    for (digest, data), (origin, owner) in zip(parsed, origins, strict=True):
        group = to_group(data, origin).with_packed_texts()
        size = len(encode(group))
        posted = len(data.tokens)
        items.append(
            IntakeGroup(
                env=origin.env, owner=owner, digest=digest, group=group, size=size, posted=posted, caller=caller
            )
        )
    return items


def _hold_span(group: str, env: str, times: Times) -> Span:
    """Return the wait with a group that arrived: for a lease, or for the rest of its group."""
    return Span(
        service="gateway",
        name="hold",
        trace=group,
        id=span_id(group, "hold"),
        parent=root_id(group),
        kind="internal",
        start_ns=times[0],
        end_ns=max(times),
        attributes={"rl.env.name": env},
    )
