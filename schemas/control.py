"""Control messages: leases, policies, curriculum and state snapshots, run records and heartbeats."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from lachesis.schemas.annotations import Stamp, StreamMark
from lachesis.schemas.codec import Event
from lachesis.schemas.columns import view
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ids import PolicyVersion, is_group_id
from lachesis.schemas.notices import Notice
from lachesis.schemas.rollout import Message, is_word
from lachesis.schemas.values import Count, Finite, Seq

__all__ = [
    "AdmissionStatus",
    "CurriculumSnapshot",
    "EpochClaim",
    "EpochRecord",
    "FixedSample",
    "FixedSamples",
    "Heartbeat",
    "HeldOutRecord",
    "LeaseReply",
    "LeaseRequest",
    "PackedHistogram",
    "PolicyRecord",
    "PromptsRecord",
    "StageIncident",
    "StageState",
    "StageVitals",
    "StatePart",
    "StateSnapshot",
    "StopKind",
    "StoreRecord",
    "SupervisorLease",
    "TokenProbe",
]


Bucket = Annotated[int, msgspec.Meta(ge=-40_000, le=40_000)]
"""Index of a histogram's bucket; every float of a second lies between these."""

StopKind = Literal["halted", "quarantined"]
"""halted: nothing is generated any more; quarantined: what is generated is not trained on."""

StageState = Literal["starting", "ok", "waiting", "backpressure", "draining"]
"""waiting: a dependency is down and being retried; backpressure: no lease, or a stream is full."""


RENEWALS_OF_A_LEASE = 4
"""How often a lease is renewed, at least, in the time after which it ends."""


class LeaseRequest(Event, frozen=True, kw_only=True):
    """Asks the governor for the right to generate one group, or renews or releases that right.

    `sequences`, 1 for each sample, and `bytes` are the most the group will weigh: to renew, what was granted is named
    again, so that a governor that has started again can take the lease over. `lease` names an existing lease (renew,
    release).
    `policy_step`: the group exists already, made by that step of the policy; it gets no lease if it will be too old by
    the time it could be in a batch. `outdated_only`: the lease is wanted only if the group is too old for every batch
    to come; it then takes no capacity. `calls`: bytes of CALLS that its calls may take; 0: they are not recorded.
    `wait_s`: to acquire, seconds for which the answer may wait for room before it is a refusal.
    """

    op: Literal["acquire", "renew", "release"]
    producer: str
    env: str
    sequences: Count = 0
    bytes: Count = 0
    lease: str | None = None
    policy_step: Count | None = None
    outdated_only: bool = False
    calls: Count = 0
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0

    def check(self) -> None:
        if self.op == "acquire" and (self.sequences < 1 or self.bytes < 1):
            raise SchemaError("acquire: sequences and bytes must be positive")
        if self.op != "acquire" and not self.lease:
            raise SchemaError(f"{self.op}: names no lease")
        if self.outdated_only and self.policy_step is None:
            raise SchemaError("outdated_only: names no policy_step")
        for name, text in (("producer", self.producer), ("env", self.env), ("lease", self.lease)):
            if text is not None and not is_word(text):  # the governor remembers them, so they must be short
                raise SchemaError(f"{name}: {text[:60]!r} is not 1 to 128 visible ASCII characters, or is '-'")


class LeaseReply(Event, frozen=True, kw_only=True):
    """`granted` false comes with the reason and with how long to wait before the next request, seconds.

    `never`: the request can never be granted, as the run is configured. `closed`: nothing at all is granted to the
    environment now, however much room there is. `contended`: other environments request leases too. `left_behind`:
    groups of the environment that a process may take up.
    """

    granted: bool
    lease: str | None = None
    expires_s: Finite | None = None
    retry_s: Finite | None = None
    reason: str | None = None
    never: bool = False
    closed: bool = False
    contended: bool = False
    left_behind: Count = 0


class AdmissionStatus(Event, frozen=True, kw_only=True):
    """Says on core NATS, once a second and when it becomes true, whether the governor can admit nothing more.

    `blocked`: a request was refused, and nothing that runs or is to be trained can change that, so only a batch smaller
    than it should be can free capacity. `last_rollout` (of ROLLOUTS, 0: none) and `last_entry` (index in the ledger,
    -1: none) are the newest that the governor knows.
    """

    run: str
    blocked: bool
    last_rollout: Count = 0
    last_entry: Annotated[int, Meta(ge=-1)] = -1


class TokenProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids, and the text that a tokenizer makes of them, without white space: they distinguish it from other
    tokenizers."""

    ids: Annotated[list[Count], msgspec.Meta(max_length=256)]
    text: Annotated[str, msgspec.Meta(max_length=1 << 16)]


class PolicyRecord(Event, frozen=True, kw_only=True):
    """The newest weights of a run, by the key `policy`.

    `weights` is a safetensors file, or names the head in the run's stream WEIGHTS (`weights.weights_location`).

    `vocabulary` is the number of token ids that the model knows, 0 and up (None: the trainer did not say). `earlier`:
    the versions published before this one, the oldest first (None: it did not say). `token_probe`: what its tokenizer
    makes of some ids.
    """

    MAX_EARLIER: ClassVar[int] = 64

    run: str
    version: str
    weights: str
    tokenizer_hash: str
    written_ns: Count
    vocabulary: Count | None = None
    earlier: Annotated[list[str], msgspec.Meta(max_length=64)] | None = None
    token_probe: TokenProbe | None = None

    @property
    def policy_version(self) -> PolicyVersion:
        return PolicyVersion.parse(self.version)

    def check(self) -> None:
        for version in (self.version, *(self.earlier or [])):
            PolicyVersion.parse(version)


class CurriculumSnapshot(Event, frozen=True, kw_only=True):
    """What to draw: `weights` float32 [items], relative; `id` is derived from the content.

    `names` are those of the items, where clients behind the gateway name them: there is one weight more then, the last
    one, of any item that is not among them.
    """

    run: str
    env: str
    revision: str
    id: str
    observed: Count
    strategy: str
    weights: bytes
    names: list[str] | None = None

    def values(self) -> NDArray[np.float32]:
        """Return the weights float32 [items]."""
        return view(self.weights, "float32", len(self.weights) // 4, "weights")

    def check(self) -> None:
        values = self.values()
        if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
            raise SchemaError("weights: must be finite, not negative and not all zero")
        if self.names is not None and len(values) != len(self.names) + 1:
            raise SchemaError(f"weights: {len(values)} for {len(self.names)} names; there is one more than names")


class FixedSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sample of number `sample` of `group`, with all that raters see of it. `alike`: its group had one score."""

    group: str
    sample: Count
    item: str
    messages: list[Message]
    task: dict[str, Any] = {}
    tokens: Count
    ending: str
    opened: str = ""
    alike: bool = False


class FixedSamples(Event, frozen=True, kw_only=True):
    """The samples of an environment that raters rate again and again, by the key `fixed_samples`. It only grows."""

    samples: list[FixedSample] = []

    def check(self) -> None:
        for one in self.samples:
            if not is_group_id(one.group) or all(message.role != "assistant" for message in one.messages):
                raise SchemaError(f"samples: that of group {one.group[:40]!r} is of no group, or has no answer")


class EpochClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A place of an epoch's order whose group is not known to be stored yet.

    `holder` names the process that works on it, in its `life` of that number, since `since_ns` (Unix time); "" after it
    was given back. `failures` counts those of the item's own code or size in this epoch.
    """

    epoch: Count
    place: Count
    holder: str
    life: Count
    since_ns: Count
    failures: Count = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.epoch, self.place


class HeldOutRecord(Event, frozen=True, kw_only=True):
    """Which tasks of an environment may be held out, by the key `held_out`: those up to the rank `limit`, in the order
    that `seed` gives. All others may have been trained on. It only ever falls."""

    seed: int
    limit: Count


class PromptsRecord(Event, frozen=True, kw_only=True):
    """The tasks of an environment at its last start, and how its prompts were made, by the key `prompts`.

    `tokenizer_hash` covers the chat template and its parameters. `messages` is the SHA-256 of the messages of the task
    with the key `item`: another one means that the same task has another prompt. "": its code failed.

    `count`: the number of tasks. `order`: a digest of their keys in the pool's order, `tasks`: of the same keys sorted,
    `contents`: of what raters are given with each. "": not known.
    """

    tokenizer_hash: str
    item: str
    messages: str
    count: Count = 0
    order: str = ""
    tasks: str = ""
    contents: str = ""


class EpochRecord(Event, frozen=True, kw_only=True):
    """How far an environment is in its epoch, by the key `epoch`: all places below `next` are stored or claimed.

    `order` names the items and the seed of the order.
    """

    order: str
    epoch: Count = 0
    next: Count = 0
    claims: list[EpochClaim] = []


class SupervisorLease(Event, frozen=True, kw_only=True):
    """The process that runs a run's services, under the key `supervisor`; written again and again while it lives.

    `folder` is the run's folder and `folder_id` what its lock file says, which no other folder's does. `machine` names
    the booted machine and its space of pids, `started` is when the process did, in ticks since that boot: together
    with the pid they name one process for ever. `released`: it has ended, and the run is free. `deleting`: it deletes
    the run, and the deletion must be finished; no process may run what is left.
    """

    run: str
    host: str
    pid: Count
    folder: str
    folder_id: str
    machine: str
    started: Count
    ttl_s: Finite
    released: bool = False
    deleting: bool = False


class StoreRecord(Event, frozen=True, kw_only=True):
    """Which streams a run has had on its server, by the key `store`: by kind, the bucket among them, the server's time
    at which each was made. What is missing there later, or was made at another time, is not what the run stored.
    `filled`: those that have held messages.
    """

    run: str
    streams: dict[str, str]
    filled: list[str] = []


class StateSnapshot(Event, frozen=True, kw_only=True):
    """The whole state of a stage after its commit `index`, which is stored at `covers` in the output stream.

    A state too large for a message is empty here: it lies in the messages `parts` of the same stream (`StatePart`), in
    this order, in the set `slot` of subjects. `sha256` is that of the whole state. `read`: as in
    `Commit`.
    """

    stage: str
    index: Count
    covers: Count
    cursors: dict[str, Count]
    state: bytes
    parts: list[Seq] = []
    slot: Annotated[int, Meta(ge=0, le=1)] = 0
    sha256: bytes
    read: dict[str, StreamMark] = {}


class StatePart(Event, frozen=True, kw_only=True):
    """A piece of a stage's state after commit `index`; whether it counts says the snapshot that lists it."""

    stage: str
    index: Count
    data: bytes


class PackedHistogram(msgspec.Struct, frozen=True, array_like=True):
    """A base-2 exponential histogram of seconds at scale 5: counts by bucket index, zeros and negatives apart."""

    count: Count
    total: Finite
    low: Finite
    high: Finite
    zeros: Count
    negatives: Count
    indexes: list[Bucket]
    counts: list[Count]


class StageVitals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage's figures since it started: counters, and histograms of wait and process time in packed form.

    `given_back` counts what was put off because something that it needs is away, and comes again. `slots` is how many
    things it can work on at once, and `busy_s` the seconds of work done in all of them, what is under way included;
    over a span of time its load is the growth of `busy_s` / (span * slots). `since_ns`: since when it is in its state,
    Unix ns by its own clock. `notices`: what goes wrong while it goes on, and a person has to mend.
    """

    state: StageState = "ok"
    handled: Count = 0
    emitted: Count = 0
    redelivered: Count = 0
    retried: Count = 0
    given_back: Count = 0
    dead: Count = 0
    in_flight: Count = 0
    lag: Count | None = None
    slots: Count | None = None
    busy_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    wait: PackedHistogram | None = None
    process: PackedHistogram | None = None
    note: str | None = None
    since_ns: Count | None = None
    notices: list[Notice] = []

    @property
    def problems(self) -> list[str]:
        """The texts of its notices."""
        return [one.what for one in self.notices]


class Heartbeat(Event, frozen=True, kw_only=True):
    """Sent once a second on core NATS by every service. `metrics` are the service's own figures by metric name.

    `slow` names rollouts that lately ended here and were long under way: group id and seconds from task to end.
    `stopped` names the environments that a health check keeps from training, and how. `instance` is one life of a
    process; `replica` is its name among those of its service, which stays the same over restarts, and `host` its
    machine.
    `schema_version` is the newest wire version that its build writes; readers believe a message of a newer version than
    theirs only if it is said here. `acknowledged`: by stream the highest
    sequence of a message that the process stored, so that it is missed where the server loses it.
    """

    run: str
    service: str
    instance: str
    pid: Count
    time_ns: Count
    stage: StageVitals
    metrics: dict[str, Finite] = {}
    slow: dict[str, Finite] = {}
    stopped: dict[str, list[StopKind]] = {}
    replica: str = ""
    host: str
    schema_version: Count
    acknowledged: dict[str, Count] = {}

    def check(self) -> None:
        for packed in (self.stage.wait, self.stage.process):
            if packed is not None and len(packed.indexes) != len(packed.counts):
                raise SchemaError("stage: a histogram's indexes and counts differ in length")


class StageIncident(Event, frozen=True, kw_only=True):
    """Says on core NATS that a stage has handled a group that was delivered to it more than once, or has given it up
    because of `error`, so that its trace is kept also where no annotation says so.
    """

    run: str
    group: str
    stamp: Stamp
    error_type: str | None = None
    error: str | None = None

    def check(self) -> None:
        if not is_group_id(self.group):
            raise SchemaError(f"group {self.group[:60]!r} is no group id: 32 hex digits")
