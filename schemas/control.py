"""Control messages: leases, policy records, curriculum snapshots, run records, state snapshots and heartbeats."""

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.codec import Event
from lachesis.schemas.columns import view
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ids import PolicyVersion

__all__ = [
    "CurriculumSnapshot",
    "Heartbeat",
    "LeaseReply",
    "LeaseRequest",
    "PackedHistogram",
    "PolicyRecord",
    "RunRecord",
    "StageHealth",
    "StageState",
    "StateSnapshot",
]


StageState = Literal["starting", "ok", "waiting", "backpressure", "draining"]
"""waiting: a dependency is down and being retried; backpressure: no lease, or a stream is full."""


class LeaseRequest(Event, frozen=True, kw_only=True):
    """Asks the governor for the right to generate one group, or renews or releases that right.

    `sequences` and `bytes` are the most the group will weigh. `lease` names an existing lease (renew, release).
    """

    op: Literal["acquire", "renew", "release"]
    producer: str
    env: str
    sequences: int = 0
    bytes: int = 0
    lease: str | None = None

    def check(self) -> None:
        if self.op == "acquire" and (self.sequences < 1 or self.bytes < 1):
            raise SchemaError("acquire: sequences and bytes must be positive")
        if self.op != "acquire" and not self.lease:
            raise SchemaError(f"{self.op}: names no lease")


class LeaseReply(Event, frozen=True, kw_only=True):
    """`granted` false comes with the reason and with how long to wait before asking again, seconds."""

    granted: bool
    lease: str | None = None
    expires_s: float | None = None
    retry_s: float | None = None
    reason: str | None = None


class PolicyRecord(Event, frozen=True, kw_only=True):
    """The newest weights of a run, under its name in the policy bucket. `weights` is a safetensors file."""

    run: str
    version: str
    weights: str
    tokenizer_hash: str
    written_ns: int

    @property
    def policy_version(self) -> PolicyVersion:
        return PolicyVersion.parse(self.version)

    def check(self) -> None:
        PolicyVersion.parse(self.version)


class CurriculumSnapshot(Event, frozen=True, kw_only=True):
    """What to draw: `weights` float32 [items], relative; `id` is derived from the content."""

    run: str
    env: str
    revision: str
    id: str
    observed: int
    strategy: str
    weights: bytes

    def values(self) -> NDArray[np.float32]:
        """Return the weights float32 [items]."""
        return view(self.weights, "float32", len(self.weights) // 4, "weights")

    def check(self) -> None:
        values = self.values()
        if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
            raise SchemaError("weights: must be finite, not negative and not all zero")


class RunRecord(Event, frozen=True, kw_only=True):
    """What a run is, under its name in the runs bucket. `config` is the resolved configuration without secrets."""

    run: str
    created_ns: int
    envs: list[str]
    trainer: str
    config: dict[str, Any] = {}


class StateSnapshot(Event, frozen=True, kw_only=True):
    """The whole state of a stage after its commit `index`, which is stored at `covers` in the output stream."""

    stage: str
    index: int
    covers: int
    cursors: dict[str, int]
    state: bytes


class PackedHistogram(msgspec.Struct, frozen=True, array_like=True):
    """A base-2 exponential histogram of seconds at scale 5: counts by bucket index, zeros and negatives apart."""

    count: int
    total: float
    low: float
    high: float
    zeros: int
    negatives: int
    indexes: list[int]
    counts: list[int]


class StageHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage's figures since it started: counters, and histograms of wait and process time in packed form."""

    state: StageState = "ok"
    handled: int = 0
    emitted: int = 0
    redelivered: int = 0
    retried: int = 0
    dead: int = 0
    in_flight: int = 0
    lag: int | None = None
    wait: PackedHistogram | None = None
    process: PackedHistogram | None = None
    note: str | None = None


class Heartbeat(Event, frozen=True, kw_only=True):
    """Sent once a second on core NATS by every service. `metrics` are the service's own figures by metric name."""

    run: str
    service: str
    instance: str
    pid: int
    time_ns: int
    stage: StageHealth
    metrics: dict[str, float] = {}

    def check(self) -> None:
        for packed in (self.stage.wait, self.stage.process):
            if packed is not None and len(packed.indexes) != len(packed.counts):
                raise SchemaError("stage: a histogram's indexes and counts differ in length")
