"""A whole run inside one process, on any bus, for tests of backpressure.

Real: governor, batcher, normalizer, scorer, teacher and environments. Played: the inference server, the teacher's
server and the trainer, which a test slows, stops and kills. The figures that bounds are asserted on come from two
independent counts: the governor's own (`governor.worst`), and `peak`, from the streams and the servers' notes alone.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import anyio
import msgspec
import numpy as np
import pytest
from anyio.abc import TaskStatus
from stages import run_batcher, run_environment, run_governor, run_normalizer, run_scorer

from lachesis import Environment, Session, Task
from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig, TeacherConfig
from lachesis.pipeline.environment import stage as environment_stage
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.governor import stage as governor_stage
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.governor.logic import Governor
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.client import Capabilities
from lachesis.pipeline.inference.identity import IdentityGuard, ObservedServer
from lachesis.pipeline.inference.prompt_logprobs import PromptTopLogprobs
from lachesis.pipeline.inference.protocol import SamplingParams, WeightVersionSpan
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import follow_ledger
from lachesis.pipeline.runtime.service import Service, open_service
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.teacher import stage as teacher_stage
from lachesis.pipeline.teacher.stage import run_teacher
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import LeaseReply, LeaseRequest, PolicyRecord
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.ledger import Batch, LedgerEntry
from lachesis.schemas.rollout import RolloutGroup
from lachesis.services.stage_settings import teacher_settings

RUN = "r"
PATIENCE_S = 120.0
STAGES: dict[str, Callable[[Service, RunConfig], Awaitable[None]]] = {
    "governor": run_governor,
    "batcher": run_batcher,
    "normalizer": run_normalizer,
    "scorer": run_scorer,
    "teacher": lambda service, config: run_teacher(service, teacher_settings(config)),
}


def make_config(
    *,
    lease_s: float = 3.0,
    retry_s: float = 0.05,
    batching: dict[str, Any] | None = None,
    scoring: ScoringConfig | None = None,
    **concurrency: int,
) -> RunConfig:
    """A run with environments by name, each with its groups at once; batches of 8 and a capacity of 24 by default.

    Leases outlast any pause of this process: they are renewed four times, and after two seconds without contact the
    governor gives everybody a lease period more.
    """
    return RunConfig(
        run=RUN,
        environments={
            name: EnvironmentConfig(kind=name, samples=4, concurrency=n, max_new_tokens=16, longest_tokens=64)
            for name, n in concurrency.items()
        },
        batching=BatchingConfig(**{"batch_size": 8, "max_staleness": 2, **(batching or {})}),
        scoring=scoring or ScoringConfig(),
        teacher=TeacherConfig(enabled=True),
        flow=FlowConfig(lease_s=lease_s, retry_s=retry_s),
    )


class Echo(Environment):
    """Asks for anything and rewards every other answer. `extra` bytes travel with each group's task."""

    def __init__(self, name: str, extra: Callable[[], bytes]) -> None:
        self.name = name
        self.extra = extra

    def __len__(self) -> int:
        return 8

    def task(self, index: int) -> Task:
        return Task(item=f"{index}", prompt=f"{self.name} {index}", task={"extra": self.extra()})

    def reward(self, task: Task, session: Session) -> float:
        return float(int(session.text.split()[-1]) % 2)


class Inference(FakeInference):
    """Answers after `delay_s` of the environment that asks, once `gate` is open. Its policy version names the call."""

    where = "inference server http://fake"

    def __init__(self, world: "World") -> None:
        super().__init__(lambda prompt, sample: f"answer {sample}")
        self.world = world
        self.guard = IdentityGuard()
        self.step = 0
        self.delay_s: dict[str, float] = {}
        self.gate = anyio.Event()
        self.gate.set()
        self.began_ns: list[int] = []

    async def current(self) -> Self:
        return self

    async def observe(self, _: Any, *, version: bool = False) -> ObservedServer:
        held = f"{self.step}-a-b" if version else None
        return ObservedServer(model="policy", engine="lachesis", tokenizer_hash="tok", weight_version=held)

    async def probe(self, _: Any = None) -> Capabilities:
        return Capabilities(model="m", max_model_len=4096, weight_version="0-a-b", tokenizer_hash="tok")

    async def generate(
        self, prompt_ids: Any, n: int, sampling: SamplingParams | None = None, **_: Any
    ) -> list[GeneratedSample]:
        version = f"{self.step}-{len(self.began_ns)}-x"
        self.began_ns.append(time.time_ns())
        if len(self.began_ns) > self.world.governor.granted:
            self.world.violations.append(f"generation {len(self.began_ns)} began without a lease")
        await anyio.sleep(self.delay_s.get(self.show(prompt_ids).partition(">")[2].split()[0], 0.0))
        await self.gate.wait()
        answers = await super().generate(prompt_ids, n, sampling)
        return [_made_by(version, answer) for answer in answers]


class TeacherServer:
    """Answers after `delay_s`; with None, never."""

    def __init__(self) -> None:
        self.delay_s: float | None = 0.0
        self.calls = 0
        self.guard = IdentityGuard()

    async def current(self) -> Self:
        return self

    async def probe(self) -> Capabilities:
        return Capabilities(model="big", max_model_len=4096, weight_version="0-a-b", tokenizer_hash="tok")

    async def prompt_top_logprobs(self, tokens: Any, _k: int, start: int = 0) -> PromptTopLogprobs:
        self.calls += 1
        await (anyio.sleep_forever() if self.delay_s is None else anyio.sleep(self.delay_s))
        count = len(tokens) - start
        none = np.zeros((count, 0))
        return PromptTopLogprobs(np.full(count, -1.0, np.float32), none.astype(np.int32), none.astype(np.float32))


class Answer(NamedTuple):
    """A governor's answer: what the environment held before it, and what was free after it, in sequences."""

    at_s: float
    request: LeaseRequest
    reply: LeaseReply
    held: int
    free: int


class Granted:
    """What the governors of a test, one after another, granted; `worst` is the most any of them counted."""

    def __init__(self) -> None:
        self.worst = 0
        self.granted = 0
        self.answers: list[Answer] = []
        self.now: Governor

    def watched(self) -> type[Governor]:
        notes = self

        class Watched(Governor):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                notes.now = self

            def answer_request(self, request: LeaseRequest, now_s: float) -> LeaseReply:
                return self._noted(super().answer_request, request, now_s)

            def reconsider(self, request: LeaseRequest, now_s: float) -> LeaseReply:
                return self._noted(super().reconsider, request, now_s)

            def _noted(
                self, answer: Callable[[LeaseRequest, float], LeaseReply], request: LeaseRequest, now_s: float
            ) -> LeaseReply:
                held = self._shares._held[request.env]
                reply = answer(request, now_s)
                notes.granted += request.op == "acquire" and reply.granted
                notes.worst = max(notes.worst, self.outstanding)
                notes.answers.append(Answer(now_s, request, reply, held, self.capacity - self.outstanding))
                return reply

        return Watched


class Trainer:
    """Trains a batch in `step_s`, unless it is stopped. `trained_ns` holds when each batch was in the weights."""

    def __init__(self, world: "World", step_s: float) -> None:
        self.world = world
        self.step_s = step_s
        self.batches: list[Batch] = []
        self.trained_ns: list[int] = []
        self._going = anyio.Event()
        self._going.set()
        self._stepped = anyio.Event()

    def stop(self) -> None:
        self._going = anyio.Event()

    def go_on(self) -> None:
        self._going.set()

    async def run(self) -> None:
        await self._publish(0)
        async with aclosing(follow_ledger(self.world.bus, RUN, "main", LedgerPosition())) as entries:
            async for entry in entries:
                if entry.batch is not None:
                    await anyio.sleep(self.step_s)
                    await self._going.wait()
                    self.batches.append(entry.batch)
                    self.trained_ns.append(time.time_ns())
                    await self._publish(len(self.batches))
                    self._stepped.set()
                    self._stepped = anyio.Event()

    async def _publish(self, step: int) -> None:
        record = PolicyRecord(run=RUN, version=f"{step}-a-b", weights="w", tokenizer_hash="tok", written_ns=1)
        await self.world.bus.put(keys.POLICY, encode(record))
        self.world.inference.step = step

    async def until(self, step: int) -> None:
        """Wait until so many batches are trained."""
        with anyio.fail_after(PATIENCE_S):
            while len(self.batches) < step:
                await self._stepped.wait()


class World:
    """The run. `start` and `kill` are for single services; a kill ends one at whatever line it is."""

    def __init__(self, bus: Bus, config: RunConfig, *, step_s: float = 0.01) -> None:
        self.bus = bus
        self.config = config
        self.capacity = (config.batching.max_staleness + 1) * config.batching.batch_size
        self.governor = Granted()
        self.inference = Inference(self)
        self.teacher = TeacherServer()
        self.trainer = Trainer(self, step_s)
        self.services: dict[str, Service] = {}
        self.violations: list[str] = []
        self.extra: dict[str, Callable[[], bytes]] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._tasks: anyio.abc.TaskGroup

    @asynccontextmanager
    async def running(self, *names: str) -> AsyncIterator[Self]:
        """Run the trainer and the services `names` (default: all but the teacher) while the context is open."""
        environments = [f"environment-{name}" for name in self.config.environments]
        default = ["governor", "batcher", "normalizer", "scorer", *environments]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(governor_stage, "Governor", self.governor.watched())
            patch.setattr(
                environment_stage, "load_environment", lambda kind, _: Echo(kind, self.extra.get(kind, bytes))
            )
            patch.setattr(environment_stage, "open_configured_role", partial(_role, self.inference))
            patch.setattr(teacher_stage, "open_role", partial(_role, self.teacher))
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self.trainer.run)
                for name in names or default:
                    await self.start(name)
                await self.until(lambda: hasattr(self.governor, "now"))
                yield self
                tasks.cancel_scope.cancel()
        assert not self.violations

    def _load(self, kind: str, _: object) -> Echo:
        return Echo(kind, self.extra.get(kind, bytes))

    async def start(self, name: str, *, replica: int = 1) -> Service:
        """Start a stage, or `environment-<name>`."""
        service: Service = await self._tasks.start(self._live, name, replica)
        return service

    async def _live(self, name: str, replica: int, task_status: TaskStatus[Service]) -> None:
        stage, _, environment = name.partition("-")
        with anyio.CancelScope() as scope:
            async with open_service(self.bus, name, RUN, replica=replica) as service:
                key = name if replica == 1 else f"{name}-{replica}"
                self.services[key], self._scopes[key] = service, scope
                task_status.started(service)
                if stage == "environment":
                    await run_environment(service, self.config, environment)
                else:
                    await STAGES[stage](service, self.config)

    def kill(self, name: str) -> None:
        self._scopes.pop(name).cancel()
        del self.services[name]

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - what is waited for has many sources
                await anyio.sleep(0.01)

    async def until_full(self) -> None:
        """Wait until nothing more is admitted, generated, scored or batched: all stands still behind the trainer."""
        await self.until(lambda: self._is_full(self.governor.now))

    def _is_full(self, governor: Governor) -> bool:
        knows_all = governor._trained == len(self.trainer.batches)
        return knows_all and not governor.leased and governor.untrained + governor.accepted >= self._full()

    def _full(self) -> int:
        return self.capacity - max(env.samples for env in self.config.environments.values()) + 1

    # what the streams hold

    async def entries(self) -> list[tuple[LedgerEntry, int]]:
        """Every entry of the ledger and when it was stored, Unix ns."""
        subject = subjects.ledger(RUN, "main")
        async with self.bus.read(subjects.LEDGER, [subject], follow=False) as messages:
            return [(decode(LedgerEntry, message.data), message.time_ns) async for message in messages]

    async def groups(self) -> list[tuple[int, RolloutGroup]]:
        """Every stored group with its sequence."""
        async with self.bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN)], follow=False) as messages:
            return [(message.seq, decode(RolloutGroup, message.data)) async for message in messages]

    async def fates(self) -> dict[int, str]:
        """The outcome of each rollout by its sequence. Fails if one has two."""
        found: dict[int, str] = {}
        for entry, _ in await self.entries():
            settled = [(outcome.seq, outcome.kind) for outcome in entry.outcomes]
            settled += [(ref.seq, "batched") for ref in (entry.batch.groups if entry.batch else [])]
            for seq, kind in settled:
                assert seq not in found, f"rollout {seq} has two outcomes"
                found[seq] = kind
        return found

    async def peak(self) -> int:
        """The most sequences that were, at one moment, being generated, stored without an outcome, or batched and not
        in the weights. A sequence counts from the server's note that its generation began.
        """
        ended: dict[int, int] = {}
        for entry, stored_ns in await self.entries():
            ended |= {outcome.seq: stored_ns for outcome in entry.outcomes}
            if entry.batch is not None and entry.batch.number < len(self.trainer.trained_ns):
                ended |= {ref.seq: self.trainer.trained_ns[entry.batch.number] for ref in entry.batch.groups}
        changes = []
        for seq, group in await self.groups():
            call = int(PolicyVersion.parse(group.policy_versions[0]).lineage)
            changes.append((self.inference.began_ns[call], len(group.sequences)))
            if seq in ended:
                changes.append((ended[seq], -len(group.sequences)))
        now = most = 0
        for _, change in sorted(changes):  # what ends comes before what begins at the same time
            now += change
            most = max(most, now)
        return most

    async def assert_bounded(self, *, at_least: int | None = None) -> None:
        """Assert the bound by both counts, and that the test came near it."""
        peak = await self.peak()
        print(f"capacity {self.capacity}, governor's count {self.governor.worst}, from the streams {peak}")
        assert max(self.governor.worst, peak) <= self.capacity
        assert peak >= (self._full() if at_least is None else at_least), "the test does not load what it tests"


@asynccontextmanager
async def _role(server: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
    yield server


def _made_by(version: str, answer: GeneratedSample) -> GeneratedSample:
    spans = [WeightVersionSpan(version=version, start=0, end=len(answer.token_ids))]
    return msgspec.structs.replace(answer, weight_versions=spans)
