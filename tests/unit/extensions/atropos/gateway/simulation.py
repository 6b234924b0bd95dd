"""A run around lease queues in simulated time: governor, selection of batches and queues are real, the rest is played.

Nothing waits: the clock of the event loop goes on to the next deadline. So a run of minutes takes a second.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
from anyio.abc import TaskGroup

from lachesis.pipeline.batcher.batch_choice import choose_batch
from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.environment.leases import ProducerLeases
from lachesis.pipeline.extensions.atropos.gateway.lease_queue import LeaseQueue
from lachesis.pipeline.extensions.atropos.gateway.policies import PolicyVersions
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.governor.logic import Governor
from lachesis.pipeline.ledger.producer_dedup import ResolvedSet
from lachesis.pipeline.retention.budget import MEASURED_STREAMS
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import LeaseRequest, PolicyRecord
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry
from lachesis.schemas.planning_header import Plan

__all__ = ["Env", "Trained", "simulate"]

_ROOM = StreamUsage(first=1, last=0, messages=0, bytes=0, max_bytes=1 << 40)
REQUEST_S, LOG_S = 0.002, 0.002


@dataclass(frozen=True, kw_only=True)
class Env:
    """`clients` of an environment make groups of `samples` sequences, each in `takes_s`, from `joins_s` on.

    At `leaves_s` they vanish: no request tells of it.
    """

    weight: float = 1.0
    samples: int = 4
    clients: int = 12
    takes_s: float = 0.0
    joins_s: float = 0.0
    leaves_s: float = float("inf")


@dataclass
class Trained:
    """`batches`: for each, sequences by environment, and when it was formed; `stale`: sequences dropped."""

    batch_size: int
    batches: list[Counter[str]] = field(default_factory=list)
    formed_s: list[float] = field(default_factory=list)
    stale: Counter[str] = field(default_factory=Counter)
    worst: int = 0

    def shares(self, since: int = 0, until: int | None = None) -> dict[str, float]:
        """Return the share of each environment in the sequences of batches `since` up to `until`."""
        total = sum(self.batches[since:until], Counter[str]())
        return {env: count / total.total() for env, count in total.items()}

    @property
    def incomplete(self) -> list[int]:
        return [n for n, batch in enumerate(self.batches) if batch.total() < self.batch_size]


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while it would wait."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits for ever"
        self.loop.now_s += max(0.0, timeout)
        return super().select(0)


class _Run:
    """What `ProducerLeases` needs of a service and its bus, and the log behind it."""

    tasks: TaskGroup

    def __init__(self, batching: BatchingConfig, flow: FlowConfig, step_s: float, score_s: float) -> None:
        self.batching, self.step_s, self.score_s = batching, step_s, score_s
        self.governor = Governor(flow, batching, term="t")
        self.governor.usage(dict.fromkeys(MEASURED_STREAMS, _ROOM), math.inf)  # as if measured just now, always
        self.bus = self
        self.vitals = SimpleNamespace(state="ok")
        self.draining = anyio.Event()
        self.trained = Trained(batching.batch_size)
        self.run = "r"
        self.ready: list[GroupRef] = []
        self.resolved = ResolvedSet()
        self.seq = self.entries = self.scoring = self.step = 0
        self.formed = anyio.Event()
        self.policies = PolicyVersions()
        self.publish()

    def publish(self) -> None:
        self.policies.record_version(
            PolicyRecord(run="r", version=f"{self.step}-a-b", weights="w", tokenizer_hash="t", written_ns=self.step + 1)
        )

    def mark_ok(self) -> None: ...
    def mark_waiting(self, *_: Any) -> None: ...
    def set_problem(self, *_: Any, **__: Any) -> None: ...

    async def request(self, _: str, data: bytes, *, timeout_s: float) -> bytes:
        await anyio.sleep(REQUEST_S)
        reply = encode(self.governor.answer_request(decode(LeaseRequest, data), anyio.current_time()))
        await anyio.sleep(REQUEST_S)
        return reply

    # the log

    async def store(self, env: str, samples: int, step: int, lease: str) -> None:
        await anyio.sleep(LOG_S)
        self.seq += 1
        plan = Plan(
            group=new_group_id(), producer=env, epoch=1, counter=self.seq, policy_step=step, samples=samples,
            sequences=samples, tokens=samples, started_ns=1, lease=lease,
        )  # fmt: skip
        self.tasks.start_soon(self._score, self.seq, env, plan)

    async def _score(self, seq: int, env: str, plan: Plan) -> None:
        self.scoring += 1
        await anyio.sleep(LOG_S)
        self.governor.member(seq, env, plan, anyio.current_time())
        await anyio.sleep(self.score_s)
        self.scoring -= 1
        self.ready.append(
            GroupRef(group=plan.group, seq=seq, env=env, sequences=plan.sequences, tokens=plan.tokens,
                     policy_step=plan.policy_step, advantages=[1.0] * plan.samples)
        )  # fmt: skip
        self._form()

    def _form(self, *, incomplete: bool = False) -> None:
        self._drop_stale()
        while True:
            groups = choose_batch(self.ready, self.batching.batch_size, mix=self.batching.mix, incomplete=incomplete)
            if not groups:
                return
            incomplete = False
            self.trained.batches.append(sum((Counter({ref.env: ref.sequences}) for ref in groups), Counter[str]()))
            self.trained.formed_s.append(anyio.current_time())
            size = sum(ref.sequences for ref in groups)
            self._enter(
                groups, Batch(number=len(self.trained.batches) - 1, groups=list(groups), sequences=size, tokens=size)
            )
            self._drop_stale()
            self.formed.set()
            self.formed = anyio.Event()

    def _drop_stale(self) -> None:
        late = [ref for ref in self.ready if ref.policy_step + self.batching.max_staleness < len(self.trained.batches)]
        if late:
            self.trained.stale.update({ref.env: 0 for ref in late})
            for ref in late:
                self.trained.stale[ref.env] += ref.sequences
            self._enter(late, None)

    def _enter(self, groups: list[GroupRef], batch: Batch | None) -> None:
        for ref in groups:
            self.resolved.mark(ref.seq)
        gone = {ref.seq for ref in groups}
        self.ready = [ref for ref in self.ready if ref.seq not in gone]
        self.resolved.mark_up_to(min((ref.seq for ref in self.ready), default=1) - 1)
        entry = _entry(self.entries, self.resolved, len(self.trained.batches), batch)
        self.entries += 1
        self.governor.entry(entry)

    async def train(self) -> None:
        while True:
            while self.step >= len(self.trained.batches):
                await self.formed.wait()
            await anyio.sleep(self.step_s)
            self.step += 1
            self.publish()
            self.governor.trained(self.step)

    async def tick(self) -> None:
        """What stage and batcher do now and then."""
        while True:
            now_s = anyio.current_time()
            self.governor.record_contact(now_s)
            if self.governor.is_due(now_s):
                self.governor.mark_seen_until(now_s)
            self.trained.worst = max(self.trained.worst, self.governor.outstanding)
            if self.governor.blocked and not self.scoring:
                self._form(incomplete=True)
            await anyio.sleep(0.1)


def _entry(index: int, resolved: ResolvedSet, next_batch: int, batch: Batch | None) -> LedgerEntry:
    return LedgerEntry(
        run="r", trainer="t", index=index, previous="0", watermark=resolved.watermark, resolved=resolved.pack(),
        events_cursor=0, batch=batch, next_batch=next_batch,
    )  # fmt: skip


def simulate(
    envs: dict[str, Env],
    *,
    batch_size: int,
    batches: int,
    step_s: float = 1.0,
    score_s: float = 0.02,
    max_staleness: int = 2,
) -> Trained:
    """Return what was trained once there are `batches`."""
    batching = BatchingConfig(
        batch_size=batch_size, max_staleness=max_staleness, mix={name: env.weight for name, env in envs.items()}
    )
    make = partial(_Run, batching, FlowConfig(), step_s, score_s)
    return anyio.run(_simulate, make, envs, batches, backend_options={"loop_factory": SimulatedLoop})


async def _simulate(make: Callable[[], _Run], envs: dict[str, Env], batches: int) -> Trained:
    run = make()
    async with anyio.create_task_group() as run.tasks:
        run.tasks.start_soon(run.train)
        run.tasks.start_soon(run.tick)
        for name, env in envs.items():
            leases: Any = ProducerLeases(run, name, name)  # type: ignore[arg-type]
            run.tasks.start_soon(leases.renew)
            queue = LeaseQueue(leases, run.policies, run.draining)
            run.tasks.start_soon(_environment, run, name, env, queue)
            run.tasks.start_soon(_give_back, queue)
        while len(run.trained.batches) < batches:
            await run.formed.wait()
        run.tasks.cancel_scope.cancel()
    return run.trained


async def _give_back(queue: LeaseQueue) -> None:
    while True:
        await queue.give_back_overdue(silent=False)
        await anyio.sleep(1.0)


async def _environment(run: _Run, name: str, env: Env, queue: LeaseQueue) -> None:
    async def stays() -> bool:
        return anyio.current_time() >= env.leaves_s

    async def client() -> None:
        while anyio.current_time() < env.leaves_s:
            await anyio.sleep(env.takes_s)
            if anyio.current_time() >= env.leaves_s:
                return
            step = run.step
            lease = await queue.acquire(None, env.samples, 100 * env.samples, step)
            assert lease is not None
            queue._leases.settled(lease)
            await run.store(name, env.samples, step, lease)
            await queue.wait_for_next(None, env.samples, stays)

    await anyio.sleep(env.joins_s)
    async with anyio.create_task_group() as clients:
        for _ in range(env.clients):
            clients.start_soon(client)
