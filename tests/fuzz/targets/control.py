"""Requests, heartbeats and key-value records, taken in by those who act on them."""

import asyncio
import math
import random
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import numpy as np
from fuzz.examples import EXAMPLES
from fuzz.mutate import mutate_bytes, mutate_msgpack, mutate_text
from fuzz.oracle import Target
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.environment.task_sampler import TaskSampler
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.governor.logic import Governor
from lachesis.pipeline.inference.directory import InferenceDirectory
from lachesis.pipeline.runtime.delivery_attempts import DeliveryAttempts
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.figures import ServiceFigures
from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.pipeline.telemetry.otlp import OtlpExporter
from lachesis.pipeline.telemetry.spans import RolloutEnd, Span
from lachesis.pipeline.telemetry.tracing import TraceIncident, Tracing
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import CurriculumSnapshot, Heartbeat, LeaseRequest, PolicyRecord, StageIncident
from lachesis.services.observe.live_run_state import merge

__all__ = ["targets"]


def targets() -> list[Target]:
    """Return the targets."""

    def seeds(*kinds: type) -> list[bytes]:
        return [encode(event) for event in EXAMPLES if isinstance(event, kinds)]

    return [
        Target("lease.governor", seeds(LeaseRequest), mutate_msgpack, _Leased().feed, weight=3),
        Target("heartbeat.status", seeds(Heartbeat), mutate_msgpack, _feed_heartbeat, weight=2),
        Target("heartbeat.incident", seeds(StageIncident), mutate_msgpack, _feed_incident),
        Target("bucket.policy", seeds(PolicyRecord), mutate_msgpack, _feed_policy),
        Target("bucket.curriculum", seeds(CurriculumSnapshot), mutate_msgpack, _feed_curriculum, weight=2),
        Target("bucket.attempts", [b"0", b"3"], mutate_text, _feed_attempts, weight=0.5),
        Target(
            "bucket.inference", [b"http://127.0.0.1:8000", b"https://[::1]:1/x"], _mutate_url, _feed_url, weight=0.5
        ),
    ]


class _Leased:
    """One governor that lives through all requests, as the real one does."""

    def __init__(self) -> None:
        self.governor = Governor(FlowConfig(), BatchingConfig(batch_size=16), term="t", grants_from_s=500.0)
        self.now_s = 0.0

    def feed(self, data: bytes) -> str | None:
        """Ask; the bound must hold, and what the governor remembers must not grow with what strangers ask."""
        self.now_s += 0.05
        usage = StreamUsage(first=1, last=1, messages=1, bytes=0, max_bytes=1 << 30)
        self.governor.usage(dict.fromkeys((subjects.ROLLOUTS, subjects.EVENTS), usage), self.now_s)
        self.governor.record_contact(self.now_s)
        self.governor.mark_seen_until(self.now_s)
        reply = self.governor.answer_request(decode(LeaseRequest, data), self.now_s)
        encode(reply)
        assert self.governor.outstanding <= self.governor.capacity, "more was granted than there is"
        assert all(math.isfinite(value) for value in self.governor.metrics().values())
        return "granted" if reply.granted else "refused"


def _feed_heartbeat(data: bytes) -> None:
    beat = decode(Heartbeat, data)
    for packed in (beat.stage.wait, beat.stage.process):
        if packed is not None:
            histogram = Histogram.unpack(packed)
            for q in (0.0, 0.5, 0.99, 1.0):
                value = histogram.quantile(q)
                assert value is None or math.isfinite(value)
    (row,) = merge([beat, beat], set())
    assert row.service == beat.service


class _Exported:
    """A sink that encodes what it gets, as an exporter does."""

    traces, dropped, problem = True, 0, None

    def __init__(self) -> None:
        self.roots = 0
        self._otlp = OtlpExporter({"service.name": "lachesis-batcher"}, None, None)

    def emit(self, spans: Sequence[Span]) -> None:
        encode_spans([self._otlp._readable(span) for span in spans])
        assert all(span.start_ns <= span.end_ns for span in spans)
        self.roots += sum(span.parent is None for span in spans)

    def observe(self, figures: ServiceFigures) -> None:
        pass


_SINK = _Exported()


def _feed_incident(data: bytes) -> None:
    """Whatever is announced of a rollout that ended, its trace is exported once, and can be encoded."""
    event = decode(StageIncident, data)
    tracing, before = Tracing(TelemetryConfig(ratio=0.0), _SINK), _SINK.roots
    incident = TraceIncident(event.stamp, event.error_type, event.error)
    tracing.end(
        RolloutEnd(
            group=event.group, run="r", env="sums", seq=1, sequences=2, policy_step=0, started_ns=1, ended_ns=2,
            outcome="dropped", cause="zero_variance",
        ),
        [],
    )  # fmt: skip
    for _ in range(2):
        tracing.record_incident(event.group, incident)
    assert _SINK.roots - before == 1


def _feed_policy(data: bytes) -> None:
    record = decode(PolicyRecord, data)
    assert str(record.policy_version) == record.version, "two texts name one version"


def _feed_curriculum(data: bytes) -> None:
    snapshot = decode(CurriculumSnapshot, data)
    draws = TaskSampler.from_snapshot(snapshot.values(), snapshot.id).sample(3, np.random.default_rng(0))
    assert all(0 <= draw.probability <= 1.0 + 1e-9 and snapshot.values()[draw.item] > 0 for draw in draws)


def _feed_attempts(data: bytes) -> None:
    async def read() -> int:
        async with MemoryBus() as bus:
            await bus.put(keys.attempts("d", "1"), data)
            return await DeliveryAttempts(bus, "d").deaths(1)

    assert asyncio.run(read()) >= 0


def _mutate_url(rng: random.Random, good: bytes) -> bytes:
    return mutate_text(rng, good) if rng.random() < 0.7 else mutate_bytes(rng, good)


def _feed_url(data: bytes) -> None:
    """A URL that cannot be used is passed over; the register goes on."""

    async def follow() -> None:
        async with MemoryBus() as bus, InferenceDirectory(1.0) as directory, anyio.create_task_group() as tasks:
            await bus.put(keys.inference("policy"), data)
            tasks.start_soon(directory.follow, bus, "r", "policy")
            await anyio.lowlevel.checkpoint()
            await bus.put(keys.inference("policy"), b"http://127.0.0.1:1")
            while (await directory.current()).config.url != "http://127.0.0.1:1":
                await bus.changed(until=bus.now() + 0.001)
            tasks.cancel_scope.cancel()

    asyncio.run(follow())
