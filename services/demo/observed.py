"""Folds everything seen of a run as it comes. Pure: no bus, no clock.

Takes heartbeats and stored messages of ROLLOUTS (headers), EVENTS and LEDGER. Gives the `RunState` that the live view
and the summary show. Guarantees that a message seen twice (a stream read again after the server came back) counts once.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.telemetry.heartbeat_log import HeartbeatLog
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, EvalEvent, RewardEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.observe.run_state import RunState, fields_of_step
from lachesis.services.observe.services import ServiceStatus, merged, place
from lachesis.services.planned_processes import planned_processes

__all__ = ["DrawnGroup", "ObservedBatch", "RunObservation"]

_RATE_WINDOW_NS = 10_000_000_000


@dataclass(frozen=True, slots=True)
class DrawnGroup:
    """A scored group: the step of the policy that made it, its task's index in the pool, its mean success."""

    policy_step: int
    index: int | None
    success: float | None


@dataclass(frozen=True, slots=True)
class ObservedBatch:
    """A batch of the ledger: its groups' ids, its weight, and when it was written (Unix ns)."""

    groups: list[str]
    sequences: int
    tokens: int
    written_ns: int


@dataclass(slots=True)
class RunObservation:
    """`next_seq` says from where each stream is to be read on."""

    config: RunConfig
    heartbeats: HeartbeatLog = field(default_factory=lambda: HeartbeatLog(keeps_ended=True))
    evals: dict[int, EvalEvent] = field(default_factory=dict)
    drawn: dict[str, DrawnGroup] = field(default_factory=dict)
    batches: dict[int, ObservedBatch] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    started_ns: dict[str, int] = field(default_factory=dict)
    generated_tokens: int = 0
    generated_sequences: int = 0
    dead_letters: int = 0
    peak_rss_bytes: int = 0
    cpu_s: dict[int, float] = field(default_factory=dict)
    supervisor_pids: list[int] = field(default_factory=list)
    next_seq: dict[str, int] = field(default_factory=dict)

    def heartbeat(self, beat: Heartbeat) -> None:
        """Keep the newest heartbeat of each process of a service, also once it has ended."""
        self.heartbeats.add(beat, beat.time_ns / 1e9)

    def stored(self, message: StoredMessage) -> None:
        """Take in one message; those before `next_seq` are known already.

        What is no event of ours is passed over.
        """
        if message.seq < self.next_seq.get(message.stream, 1):
            return
        self.next_seq[message.stream] = message.seq + 1
        try:
            if message.stream == subjects.ROLLOUTS:
                self._member(Plan.unpack(message.headers.get(PLAN_HEADER)))
            elif message.stream == subjects.LEDGER:
                self._entry(decode(LedgerEntry, message.data))
            else:
                self._event(message.subject.split(".")[1], message.data)
        except SchemaError:
            return  # a stage has dead-lettered it, and that is counted

    def _member(self, member: Plan) -> None:
        self.started_ns[member.group] = member.started_ns
        self.generated_tokens += member.tokens
        self.generated_sequences += member.sequences

    def _entry(self, entry: LedgerEntry) -> None:
        self.outcomes.update(outcome.kind for outcome in entry.outcomes)
        if entry.batch is not None:
            batch, groups = entry.batch, [ref.group for ref in entry.batch.groups]
            self.outcomes["batched"] += len(groups)
            self.batches[batch.number] = ObservedBatch(groups, batch.sequences, batch.tokens, entry.written_ns)

    def _event(self, kind: str, data: bytes) -> None:
        if kind == "eval":
            event = decode(EvalEvent, data)
            self.evals[event.policy_step] = event
        elif kind == "dead":
            decode(DeadLetter, data)
            self.dead_letters += 1
        elif kind == "reward":
            for group in decode(RewardEvent, data).groups:
                self.drawn.setdefault(group.group, DrawnGroup(group.policy_step, group.index, group.success))

    # figures

    def state(self, now_ns: int) -> RunState:
        """Return the state of the run, rates over the last seconds before `now_ns`.

        Its training is as the newest figures of its trainer say. A service's counts, restarts and processor time are
        over all its processes, those that have ended included.
        """
        names = sorted(self.heartbeats.services(), key=place)
        services = [_status(name, self._newest(name)) for name in names]
        beats = [beat for beat in self._newest("trainer") if beat.metrics]
        figures = max(beats, key=lambda beat: beat.time_ns).metrics if beats else {}
        recent = [batch for batch in self.batches.values() if batch.written_ns > now_ns - _RATE_WINDOW_NS]
        window_s = _RATE_WINDOW_NS / 1e9
        return RunState(
            run=self.config.run,
            steps=self.config.training.steps,
            outcomes=dict(sorted(self.outcomes.items())),
            services=services,
            restarts=self._restarts(),
            cpu_s={row.service: sum(self.cpu_s.get(pid, 0.0) for pid in row.pids) for row in services},
            window_s=window_s,
            groups_per_s=sum(len(batch.groups) for batch in recent) / window_s,
            tokens_per_s=sum(batch.tokens for batch in recent) / window_s,
            **fields_of_step(figures),
        )

    def _restarts(self) -> dict[str, int]:
        """Return how many processes of each service there were beyond those planned, where there were any."""
        planned = Counter(name for row in planned_processes(self.config) for name in row.speakers)
        lives = {name: len(self._newest(name)) - planned[name] for name in self.heartbeats.services()}
        lives["supervisor"] = len(self.supervisor_pids) - 1
        return {name: lives[name] for name in sorted(lives, key=place) if lives[name] > 0}

    def _newest(self, service: str) -> list[Heartbeat]:
        return [one.newest for one in self.heartbeats.processes(service)]

    def stopped(self) -> list[str]:
        """Return what health checks keep from training, in words: an environment and how."""
        newest = max(self._newest("health"), key=lambda beat: beat.time_ns, default=None)
        found = newest.stopped if newest is not None else {}
        return [f"{env} {kind}" for env, kinds in sorted(found.items()) for kind in kinds]

    def waits(self) -> list[str]:
        """Return what each service that waits tries again, since when and why."""
        newest = [
            max(self._newest(name), key=lambda beat: beat.time_ns)
            for name in sorted(self.heartbeats.services(), key=place)
        ]
        return [
            f"{beat.service} waits: {beat.stage.note}"
            for beat in newest
            if beat.stage.state == "waiting" and beat.stage.note
        ]


def _status(name: str, beats: list[Heartbeat]) -> ServiceStatus:
    """Return a service's row. State and lag are those of the newest heartbeat: other processes may have ended."""
    newest = max(beats, key=lambda beat: beat.time_ns).stage
    return msgspec.structs.replace(merged(name, beats), state=newest.state, lag=newest.lag)
