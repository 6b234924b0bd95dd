"""Lists every subject with the events that travel on it, in one table.

The documents, the command line and the tests read the table, `CHANNELS`. Guarantees that a subject is described in one
place only; the tests hold it against `subjects.STREAMS`, so no stream carries a subject that is missing here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lachesis.schemas import keys, subjects
from lachesis.schemas.alerts import AlertEvent, ResumeRequest, SentAlerts
from lachesis.schemas.annotations import (
    CurriculumEvent,
    DeadLetter,
    EvalEvent,
    RewardEvent,
    ScoreEvent,
    TeacherEvent,
    TeacherLogprobs,
)
from lachesis.schemas.calls import (
    GroupEnd,
    GroupStart,
    SessionCall,
    SessionEnd,
    TakeUpReply,
    TakeUpRequest,
    ToolResults,
)
from lachesis.schemas.codec import Event
from lachesis.schemas.control import (
    AdmissionStatus,
    CurriculumSnapshot,
    EpochRecord,
    FixedSamples,
    Heartbeat,
    HeldOutRecord,
    LeaseReply,
    LeaseRequest,
    PolicyRecord,
    PromptsRecord,
    StageIncident,
    StatePart,
    StateSnapshot,
    StoreRecord,
    SupervisorLease,
)
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.promotion import Promotions
from lachesis.schemas.replay import OfflineTrainerRecord, RescoreEvent, RevisionRecord
from lachesis.schemas.retention import Retention
from lachesis.schemas.rollout import RolloutGroup
from lachesis.schemas.store_marks import StoreMarks
from lachesis.schemas.weights import WeightsHead

__all__ = ["BINARY", "CHANNELS", "KEY_EVENTS", "Channel", "channel_of", "narrow"]


@dataclass(frozen=True, slots=True)
class Channel:
    """One family of subjects. `address` has its variable tokens in braces; `stream` is None on core NATS.

    `events` are what a message may hold, most frequent first; none: its bytes are no event. `reply` is what a request
    on this channel is answered with.
    """

    name: str
    address: str
    stream: str | None
    events: tuple[type[Event], ...]
    about: str
    writer: str
    reply: type[Event] | None = None

    @property
    def pattern(self) -> str:
        """The address as a NATS wildcard subject."""
        return ".".join("*" if token.startswith("{") else token for token in self.address.split("."))

    @property
    def parameters(self) -> list[str]:
        """The names of the address's variable tokens."""
        return [token[1:-1] for token in self.address.split(".") if token.startswith("{")]


def _annotation(kind: subjects.Kind, events: tuple[type[Event], ...], about: str, writer: str) -> Channel:
    address = subjects.event(kind, "{run}", "{revision}", "{env}")
    return Channel(kind, address, subjects.EVENTS, events, about, writer)


_ANNOTATIONS = (
    _annotation("score", (ScoreEvent,), "Ratings of groups by an ensemble of raters.", "scorer"),
    _annotation("reward", (RewardEvent,), "Normalized rewards and advantages of groups.", "normalizer"),
    _annotation("curriculum", (CurriculumEvent,), "Commits of the curriculum's state.", "curriculum"),
    _annotation("teacher", (TeacherEvent,), "Where a teacher's logprobs of groups are stored.", "teacher"),
    _annotation("dead", (DeadLetter,), "Messages that cannot be handled, with the reason.", "any stage"),
    _annotation("eval", (EvalEvent,), "Results of evaluations of named policy versions.", "evaluator"),
    _annotation("alert", (AlertEvent,), "What the health checks found, and where that leaves the env.", "health"),
)

CHANNELS: tuple[Channel, ...] = (
    Channel(
        "rollout",
        subjects.rollout("{run}", "{env}"),
        subjects.ROLLOUTS,
        (RolloutGroup,),
        "Groups of rollouts, each published once and never changed. A group over 4 MiB is a head that lists the "
        "sequences of its chunks; clients of the bus see one message.",
        "environment",
    ),
    Channel(
        "blob",
        subjects.blob("rollout", "{run}", "{env}", "{name}"),
        subjects.ROLLOUTS,
        (),
        "Chunks of a large group, stored before its head. Raw bytes.",
        "environment",
    ),
    Channel(
        "promotion",
        subjects.promotion("{run}", "{revision}"),
        subjects.ROLLOUTS,
        (Promotions,),
        "The revisions that the run was switched to, all of them in each message.",
        "operator, batcher",
    ),
    *_ANNOTATIONS,
    Channel(
        "replay",
        subjects.replay("rescore", "{run}", "{revision}", "{env}"),
        subjects.REPLAY,
        (RescoreEvent,),
        "Scores and rewards of re-scored history, and the commits of the replay that made them.",
        "replay",
    ),
    Channel(
        "revision",
        subjects.replay("revision", "{run}", "{revision}", "{env}"),
        subjects.REPLAY,
        (RevisionRecord,),
        "What a revision of re-scored history is; the last token is `all`. Stored once.",
        "replay",
    ),
    Channel(
        "logprobs",
        subjects.logprobs("{run}", "{revision}", "{env}"),
        subjects.TEACHER,
        (TeacherLogprobs,),
        "A teacher's logprobs of one group's sampled tokens.",
        "teacher",
    ),
    Channel(
        "logprobs-blob",
        subjects.blob("logprobs", "{run}", "{env}", "{name}"),
        subjects.TEACHER,
        (),
        "Chunks of a large group's logprobs, stored before their head. Raw bytes.",
        "teacher",
    ),
    Channel(
        "ledger",
        subjects.ledger("{run}", "{trainer}"),
        subjects.LEDGER,
        (LedgerEntry,),
        "The chained record of batches and of what became of every other group. One fenced writer.",
        "batcher",
    ),
    Channel(
        "state",
        subjects.state("{run}", "{stage}", "{revision}", "{partition}"),
        subjects.LEDGER,
        (StateSnapshot, StatePart, TrainReport, OfflineTrainerRecord, StoreMarks),
        "Snapshots of stateful stages; a trainer (stage `trainer`, partition its name) writes its reports here, and "
        "one on past rollouts (stage `past`) what it trains on; the governor (stage `marks`) how far the streams go.",
        "stateful stages, trainer, operator",
    ),
    Channel(
        "weights",
        subjects.weights_heads("{run}"),
        subjects.WEIGHTS,
        (WeightsHead,),
        "Which weights of the policy are stored in chunks, with weights.transport nats. One fenced writer.",
        "trainer",
    ),
    Channel(
        "weights-chunk",
        subjects.weights_chunks("{run}"),
        subjects.WEIGHTS,
        (),
        "Chunks of the policy's weights; the heads list them. Old ones are deleted.",
        "trainer",
    ),
    Channel(
        "call",
        subjects.call("{run}", "{env}"),
        subjects.CALLS,
        (SessionCall, ToolResults, SessionEnd, GroupStart, GroupEnd),
        "The calls of conversations under way, each stored before its caller has the answer; the header "
        "Lachesis-Call names the kind of a message and its group. Deleted once the group is a rollout.",
        "environment",
    ),
    Channel(
        "lease",
        subjects.lease("{run}", "{env}"),
        None,
        (LeaseRequest,),
        "Requests for the right to generate groups.",
        "environment",
        reply=LeaseReply,
    ),
    Channel(
        "takeup",
        subjects.take_up("{run}", "{env}"),
        None,
        (TakeUpRequest,),
        "Requests for groups under way that were left behind, and for their calls.",
        "environment",
        reply=TakeUpReply,
    ),
    Channel(
        "admission",
        subjects.admission("{run}"),
        None,
        (AdmissionStatus,),
        "Whether the governor can admit anything more; not stored.",
        "governor",
    ),
    Channel(
        "heartbeat",
        subjects.heartbeat("{run}", "{service}", "{instance}"),
        None,
        (Heartbeat,),
        "Each service's figures, once a second; not stored.",
        "every service",
    ),
    Channel(
        "incident",
        subjects.incident("{run}"),
        None,
        (StageIncident,),
        "Groups that a stage has handled again or in vain, for the services that end their traces; not stored.",
        "scorer, teacher",
    ),
)

KEY_EVENTS: Mapping[str, tuple[type[Event], ...]] = MappingProxyType(
    {
        keys.STORE: (StoreRecord,),
        keys.SUPERVISOR: (SupervisorLease,),
        keys.POLICY: (PolicyRecord,),
        keys.curriculum("{revision}", "{env}"): (CurriculumSnapshot,),
        keys.epoch("{env}"): (EpochRecord,),
        keys.fixed_samples("{revision}", "{env}"): (FixedSamples,),
        keys.held_out("{env}"): (HeldOutRecord,),
        keys.prompts("{env}"): (PromptsRecord,),
        keys.RETENTION: (Retention,),
        keys.MARKS: (StoreMarks,),
        keys.resume("{env}"): (ResumeRequest,),
        keys.webhook("{revision}"): (SentAlerts,),
    }
)
"""What the values of the run's bucket hold, by key; those of other keys are no events."""

BINARY: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Attachment": {"data": "bytes"},
        "Column": {"data": "dtype"},
        "Commit": {"delta": "msgpack"},
        "CurriculumSnapshot": {"weights": "float32"},
        "LedgerEntry": {"resolved": "bits"},
        "SessionCall": {
            "digest": "bytes",
            "prompt": "int32",
            "tokens": "int32",
            "logprobs": "float32",
        },
        "RolloutGroup": {"packed_messages": "zlib"},
        "Sequences": {
            "offsets": "int32",
            "tokens": "int32",
            "loss_mask": "bits",
            "logprobs": "float32",
            "token_advantages": "float32",
            "token_bits": "bits",
        },
        "StatePart": {"data": "bytes"},
        "StateSnapshot": {"sha256": "bytes", "state": "msgpack"},
        "StoredRecord": {"data": "msgpack"},
        "TeacherLogprobs": {
            "logprobs": "float32",
            "span_logprobs": "float32",
            "span_starts": "int32",
            "topk_ids": "int32",
            "topk_logprobs": "float16",
            "topk_mass": "float16",
            "topk_tail": "float16",
        },
        "WeightsHead": {"sha256": "bytes"},
    }
)
"""What the binary fields of each struct hold, little-endian; bits: packed, lowest first; dtype: the struct names it;
zlib: compressed msgpack."""


def channel_of(subject: str) -> Channel | None:
    """Return the channel that a subject without wildcards belongs to."""
    return next((channel for channel in CHANNELS if narrow(subject, channel.pattern) == subject), None)


def narrow(wanted: str, pattern: str) -> str | None:
    """Return the subjects of `pattern` that `wanted` matches too; None if there are none.

    `wanted` is a subject; `*` and `>` are allowed.
    """
    theirs, ours = wanted.split("."), pattern.split(".")
    if theirs[-1] == ">" and len(theirs) <= len(ours):
        theirs[-1:] = ["*"] * (len(ours) - len(theirs) + 1)
    if len(theirs) != len(ours):
        return None
    if any("*" not in pair and pair[0] != pair[1] for pair in zip(theirs, ours, strict=True)):
        return None
    return ".".join(a if b == "*" else b for a, b in zip(theirs, ours, strict=True))
