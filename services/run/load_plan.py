"""Plans what a load takes: bytes, disk, network, processor time, processes, and what is full first.

Pure: bytes come from `load_messages`, processor time from `load_costs`. A process that may run several times gets as
many as its work needs. What is one by design (the governor, say, or the leader of a stream, which does a stream's work)
has a rate at which it is full; the lowest of these is the bottleneck of a run.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from lachesis.schemas.subjects import EVENTS, LEDGER, ROLLOUTS, TEACHER
from lachesis.services.run.load_costs import CostTable, ProcessCost, lone_share
from lachesis.services.run.load_messages import GroupShape, MessageSize

__all__ = [
    "ENVIRONMENT",
    "FEED",
    "SERVER",
    "SEVERAL",
    "Load",
    "LoadPlan",
    "NetworkPlan",
    "ProcessPlan",
    "StreamPlan",
    "leader_costs",
    "plan_load",
    "process_costs",
]

MAX_UTILISATION = 0.7
"""Share of a core that a process, and of its cores that a node, is planned to be busy: above it queues grow fast."""
ENVIRONMENT, FEED, SERVER = "environment", "trainer's feed", "nats-server"
LEADER = "leader of "
SEVERAL = (ENVIRONMENT, "scorer", "teacher")
"""Processes that may run several times."""
_RECORDED_AS = {ENVIRONMENT: "producer", FEED: "consumer"}
_READERS: dict[str, tuple[tuple[str, bool], ...]] = {
    "rollout": (
        ("scorer", True), ("teacher", True), (FEED, True), ("governor", False), ("normalizer", False),
        ("batcher", False),
    ),
    "score": (("normalizer", True), ("health", True)),
    "reward": (("batcher", True), ("curriculum", True), ("health", True)),
    "alert": (("governor", True), ("batcher", True)),
    "ledger": (("governor", True), (FEED, True), ("health", True)),
    "logprobs": ((FEED, True),),
    "teacher": (("batcher", True),),
}  # fmt: skip
"""By kind of message the services that are sent it, and whether with its payload."""
_PASSES = 3
"""Times that the server moved a rollout's payload where its costs were measured: in, to the scorer, to the trainer."""
_UNKNOWN = (
    "not in it: generation and training (GPU), the environments' own code, the raters' own time beyond that of three "
    "trivial ones, conversations that are recorded (CALLS), weights, latency of the network, speed of disks"
)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A load, and the machines for it.

    `retention_s` None: as long as the budget of ROLLOUTS lasts. `budgets`: bytes by stream, of which trimming
    leaves `kept_share`. `pace`: processor time here by that on the machine of the measurements.
    """

    groups_per_s: Annotated[float, Meta(gt=0)]
    shape: GroupShape
    budgets: dict[str, int]
    kept_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    retention_s: Annotated[float, Meta(gt=0)] | None = None
    replicas: int = 1
    cores: Annotated[int, Meta(ge=1)] = 2
    pace: Annotated[float, Meta(gt=0)] = 1.0
    has_health: bool = True


class StreamPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream takes, bytes of one copy. `kept`: for the retention; `room`: what trimming leaves in its budget."""

    name: str
    bytes_per_group: float
    bytes_per_s: float
    kept: float
    room: float

    @property
    def fits(self) -> bool:
        return self.kept <= self.room * (1 + 1e-9)


class NetworkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second at the servers: published, sent to each service, and copied from server to server."""

    published: float
    delivered: dict[str, float]
    replicated: float

    @property
    def total(self) -> float:
        return self.published + sum(self.delivered.values()) + self.replicated


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`count` processes: processor time of all of them, seconds a second, and how busy each is, as a share of a core; a
    nats-server of its node's cores.

    `full_at`: groups a second at which it is full; None: more of them can be started.
    """

    name: str
    count: int
    cpu_ms_per_group: float
    cpu_s_per_s: float
    utilisation: float
    full_at: float | None


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a load takes. `leaders` are parts of nats-server: one for each stream, wherever it runs."""

    groups_per_s: float
    tokens_per_s: float
    streams: list[StreamPlan]
    retention_s: float
    disk_in_all: float
    disk_per_node: float
    network: NetworkPlan
    processes: list[ProcessPlan]
    leaders: list[ProcessPlan]
    cpu_s_per_s: float
    nodes: int
    bottleneck: str
    full_at: float
    fits: bool
    text: str
    cures: list[str]
    settings: list[str]
    notes: list[str]


def plan_load(load: Load, messages: Sequence[MessageSize], costs: CostTable) -> LoadPlan:
    """Return what a load takes on nodes of `load.cores` cores."""
    rate, shape = load.groups_per_s, load.shape
    network = _network(load, messages)
    nodes, processes, leaders = _placed(load, messages, costs)
    retention_s, streams = _streams(load, messages)
    one_each = [one for one in (*processes, *leaders) if one.full_at is not None]
    bottleneck = min(one_each, key=lambda one: one.full_at or math.inf)
    full_at = bottleneck.full_at or math.inf
    kept = load.replicas * sum(stream.kept for stream in streams)
    fits = full_at >= rate
    cpu = sum(one.cpu_s_per_s for one in processes)
    verb = "is full first" if fits else "is the bottleneck and one by design"
    text = f"{bottleneck.name} {verb}, at {full_at:,.0f} groups/s; " + (
        f"{rate:,g} are wanted: it is busy {bottleneck.utilisation:.0%} of the time"
        if fits
        else f"{rate:,g} are wanted, so one run cannot carry them"
    )
    return LoadPlan(
        groups_per_s=rate, tokens_per_s=rate * shape.samples * shape.tokens, streams=streams, retention_s=retention_s,
        disk_in_all=kept, disk_per_node=kept / nodes, network=network, processes=processes, leaders=leaders,
        cpu_s_per_s=cpu, nodes=nodes, bottleneck=bottleneck.name, full_at=full_at, fits=fits, text=text,
        cures=[] if rate <= MAX_UTILISATION * full_at else _cures(load, bottleneck.name, full_at),
        settings=_settings(load, streams, processes), notes=_notes(load, costs),
    )  # fmt: skip


def process_costs(load: Load, messages: Sequence[MessageSize], costs: CostTable) -> dict[str, ProcessCost]:
    """Return the cost by process of this load on its machine: all that a group takes is in `group_ms`."""
    megabytes, taught = _megabytes(messages, "rollout"), _megabytes(messages, "logprobs")
    known = costs.processes
    found = {
        ENVIRONMENT: _here(load, known["producer"], megabytes),
        "scorer": _here(load, known["scorer"], megabytes),
    }
    if taught:  # it reads a rollout as a scorer does, and stores arrays as an environment does
        stores_ms = known["producer"].megabyte_ms * taught
        found["teacher"] = _here(load, known["scorer"], megabytes, stores_ms)
    for name in ("governor", "normalizer", "batcher", "curriculum", *(["health"] * load.has_health)):
        found[name] = _here(load, known[name], megabytes)
    found[FEED] = _here(load, known["consumer"], megabytes + taught)
    found[SERVER] = _here(load, known[SERVER], _passed_megabytes(messages))
    return found


def leader_costs(load: Load, messages: Sequence[MessageSize], costs: CostTable) -> dict[str, ProcessCost]:
    """Return the part of the server's work that each stream causes: its messages' and its bytes' share."""
    server, named = costs.processes[SERVER], process_costs(load, messages, costs)
    counts, sizes = dict[str, float](), dict[str, float]()
    for message in messages:
        readers = [full for name, full in _READERS.get(message.kind, ()) if name in named]
        moved = message.per_group * message.size * (1 + sum(readers))
        counts[message.stream] = counts.get(message.stream, 0.0) + message.per_group * (1 + len(readers))
        sizes[message.stream] = sizes.get(message.stream, 0.0) + moved
    found = {}
    for stream, count in counts.items():
        by_count, by_size = count / sum(counts.values()), sizes[stream] / sum(sizes.values())
        part = msgspec.structs.replace(
            server, group_ms=server.group_ms * by_count, batch_ms=server.batch_ms * by_count,
            lone_ms=server.lone_ms * by_count, idle_ms=server.idle_ms * by_count,
            megabyte_ms=server.megabyte_ms * by_size,
        )  # fmt: skip
        found[LEADER + stream] = _here(load, part, _passed_megabytes(messages))
    return found


def _here(load: Load, cost: ProcessCost, megabytes: float, further_ms: float = 0.0) -> ProcessCost:
    return ProcessCost(
        group_ms=load.pace * (cost.busy_ms(megabytes, load.shape.batch_groups) + further_ms),
        megabyte_ms=0.0, batch_ms=0.0, lone_ms=load.pace * cost.lone_ms, idle_ms=load.pace * cost.idle_ms,
        gather_s=cost.gather_s,
    )  # fmt: skip


def _megabytes(messages: Sequence[MessageSize], kind: str) -> float:
    return sum(message.size * message.per_group for message in messages if message.kind == kind) / 1e6


def _passed_megabytes(messages: Sequence[MessageSize]) -> float:
    """Return the bytes for which the server's costs count: those of a rollout, which passes three times, or more."""
    megabytes, taught = _megabytes(messages, "rollout"), _megabytes(messages, "logprobs")
    return megabytes + ((2 * taught + megabytes) / _PASSES if taught else 0.0)


def _placed(
    load: Load, messages: Sequence[MessageSize], costs: CostTable
) -> tuple[int, list[ProcessPlan], list[ProcessPlan]]:
    """Return the nodes, and how busy each process is on them.

    Groups come one by one as long as neither a process nor the node that it shares is busy with the groups before.
    """
    here, leaders = process_costs(load, messages, costs), leader_costs(load, messages, costs)
    nodes = load.replicas
    while True:
        capacity = 1e3 * load.cores * nodes
        node_full_at = capacity / sum(cost.group_ms for cost in here.values())
        planned = [_planned(name, cost, load, node_full_at, nodes) for name, cost in here.items()]
        needed = math.ceil(sum(one.cpu_s_per_s for one in planned) / (MAX_UTILISATION * load.cores))
        if needed <= nodes:
            return nodes, planned, [_planned(name, one, load, node_full_at, nodes) for name, one in leaders.items()]
        nodes = needed


def _planned(name: str, cost: ProcessCost, load: Load, node_full_at: float, nodes: int) -> ProcessPlan:
    rate, group_ms = load.groups_per_s, cost.group_ms
    further = load.replicas - 1
    if name == SERVER:  # a further copy is sent by one server, and stored by another
        group_ms *= (_PASSES + 2 * further) / _PASSES
    elif name.startswith(LEADER):
        group_ms *= (_PASSES + further) / _PASSES
    count, full_at = nodes if name == SERVER else 1, max(0.0, 1e3 - cost.idle_ms) / group_ms
    while True:
        lone = lone_share(rate, min(count * full_at, node_full_at), cost.gather_s)
        per_group_ms = group_ms + cost.lone_ms * lone
        busy = rate * per_group_ms / 1e3 + count * cost.idle_ms / 1e3
        if name not in SEVERAL or busy <= MAX_UTILISATION * count:
            break
        count += max(1, math.ceil(busy / MAX_UTILISATION) - count)
    one_by_design = name not in {*SEVERAL, SERVER}
    return ProcessPlan(
        name=name, count=count, cpu_ms_per_group=per_group_ms, cpu_s_per_s=busy,
        utilisation=busy / count / (load.cores if name == SERVER else 1), full_at=full_at if one_by_design else None,
    )  # fmt: skip


def _network(load: Load, messages: Sequence[MessageSize]) -> NetworkPlan:
    names = {"scorer", "governor", "normalizer", "batcher", "curriculum", FEED, *(["health"] * load.has_health)}
    names |= {"teacher"} if _megabytes(messages, "logprobs") else set()
    published, delivered = 0.0, dict[str, float]()
    for message in messages:
        each_s = load.groups_per_s * message.per_group
        published += each_s * message.size
        for name, full in _READERS.get(message.kind, ()):
            if name in names:
                delivered[name] = delivered.get(name, 0.0) + each_s * (message.size if full else message.header)
    return NetworkPlan(published=published, delivered=delivered, replicated=(load.replicas - 1) * published)


def _streams(load: Load, messages: Sequence[MessageSize]) -> tuple[float, list[StreamPlan]]:
    by_group = dict.fromkeys((ROLLOUTS, EVENTS, LEDGER), 0.0)
    lasting = dict(by_group)
    for message in messages:
        size = message.size * message.per_group
        by_group[message.stream] = by_group.get(message.stream, 0.0) + size
        lasting[message.stream] = lasting.get(message.stream, 0.0) + size * message.lasts
    rate = load.groups_per_s
    retention_s = load.retention_s
    if retention_s is None:
        retention_s = load.kept_share * load.budgets[ROLLOUTS] / (by_group[ROLLOUTS] * rate)
    return retention_s, [
        StreamPlan(
            name=name, bytes_per_group=size, bytes_per_s=size * rate, kept=lasting[name] * rate * retention_s,
            room=load.kept_share * load.budgets[name],
        )
        for name, size in by_group.items()
    ]  # fmt: skip


def _cures(load: Load, bottleneck: str, full_at: float) -> list[str]:
    """Say what helps; the number of runs leaves each as much room as other processes are planned to have."""
    runs = math.ceil(load.groups_per_s / (MAX_UTILISATION * full_at))
    found = [
        f"spread the environments over {runs} runs: each has a {bottleneck} and streams of its own, and a trainer",
    ]
    if bottleneck not in {FEED, LEADER + ROLLOUTS, LEADER + TEACHER}:  # whose work is bytes for the most part
        found.append(f"larger groups, of {2 * load.shape.samples} samples: half as many carry the same samples")
    if bottleneck in {LEADER + EVENTS, "normalizer", "health"} and load.shape.raters > 1:
        found.append("fewer raters: each adds a rating for every sample to what is stored and read of a group")
    if bottleneck == FEED:
        found.append("training.ranks: each rank fetches its own share of a batch")
    if bottleneck == LEADER + TEACHER:
        found.append("a smaller teacher.top_k")
    return found


def _settings(load: Load, streams: Sequence[StreamPlan], processes: Sequence[ProcessPlan]) -> list[str]:
    """Return the settings that differ from those of the configuration, or that the plan counts on."""
    found = [f"streams.replicas = {load.replicas}"] if load.replicas > 1 else []
    found += [
        f"streams.{stream.name.lower()}_bytes = {math.ceil(stream.kept / load.kept_share / (1 << 20)) << 20}"
        for stream in streams
        if not stream.fits
    ]
    setting = {ENVIRONMENT: "environments", "scorer": "scorers", "teacher": "teachers"}
    several = [one for one in processes if one.name in setting and one.count > 1]
    return [*found, *(f"services.{setting[one.name]} = {one.count}" for one in several)]


def _notes(load: Load, costs: CostTable) -> list[str]:
    shape = load.shape
    notes = [
        f"assumed: groups of {shape} tokens with text, {shape.raters} raters, batches of {shape.batch_groups} groups",
        f"assumed: nodes of {load.cores} cores, which may be {MAX_UTILISATION:.0%} busy",
        f"processor time: measured on {costs.machine} ({'; '.join(costs.origin)}), times {load.pace:.2f} for this one",
        _UNKNOWN,
        "a stream's leader is taken to do all work for its stream in one thread, which a server does not for reading",
    ]
    if load.replicas > 1:
        notes.append(
            "a further copy is taken to cost a third of what the first one does where it is sent, and another third "
            "where it is stored; not measured"
        )
    if shape.teacher_top_k is not None:
        notes.append("the teacher's processor time is put together from scorer and environment; not measured")
    return notes
