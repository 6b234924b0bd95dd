"""Records of calls to the model, from which a conversation goes on after its process was killed.

Each is stored before its caller has the answer.

All lie on `subjects.call` in the order in which they happened, between the `GroupStart` of their group and its
`GroupEnd`. The header `CALL_HEADER` says what a message holds, so that it need not be decoded for that. A process gets
the records of a group that another life has left behind from the governor (`TakeUpRequest`), and goes on.
"""

import re
from typing import Annotated, Final, Literal, NamedTuple, Self

import msgspec
import numpy as np
from msgspec import Meta

from lachesis.schemas.codec import Event
from lachesis.schemas.columns import Column, view
from lachesis.schemas.control import EpochClaim
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ids import PolicyVersion, is_group_id
from lachesis.schemas.rollout import Dispatch, Message, is_word
from lachesis.schemas.sequences import FinishReason
from lachesis.schemas.values import Count, Finite

__all__ = [
    "CALL_HEADER",
    "MAX_FORK_CHARS",
    "CallKey",
    "GroupEnd",
    "GroupStart",
    "RecordKind",
    "SessionCall",
    "SessionEnd",
    "StoredRecord",
    "TakeUpReply",
    "TakeUpRequest",
    "ToolResults",
]

CALL_HEADER: Final = "Lachesis-Call"

RecordKind = Literal["start", "call", "tools", "session", "end"]
"""GroupStart, SessionCall, ToolResults, SessionEnd, GroupEnd."""

_KINDS: Final = frozenset(RecordKind.__args__)  # type: ignore[attr-defined]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_MAX_HEADER_CHARS: Final = 512
_DIGEST_BYTES: Final = (8, 64)
MAX_FORK_CHARS: Final = 128
_FORK: Final = re.compile(r"([0-9]+(\.[0-9]+)*)?")


class CallKey(NamedTuple):
    """What the header says: the kind of a message and its group; of a start also the process at work, its life and its
    lease."""

    kind: RecordKind
    group: str
    holder: str | None = None
    life: int = 0
    lease: str | None = None

    def pack(self) -> str:
        if self.kind != "start":
            return f"{self.kind} {self.group}"
        return f"start {self.group} {self.holder} {self.life} {self.lease or '-'}"

    @classmethod
    def unpack(cls, header: str | None) -> Self:
        """Return what a header says. Raises `SchemaError`."""
        kind, _, rest = (header or "")[:_MAX_HEADER_CHARS].partition(" ")
        group, *words = rest.split(" ")
        if kind not in _KINDS or not is_group_id(group) or len(words) != (3 if kind == "start" else 0):
            raise SchemaError(f"{CALL_HEADER}: {header!r:.80} is not a kind of record and a group")
        if not words:
            return cls(kind, group)  # type: ignore[arg-type]  # it is one of the kinds
        holder, life, lease = words
        if not (is_word(holder) and life.isascii() and life.isdecimal() and len(life) < 20 and lease):
            raise SchemaError(f"{CALL_HEADER}: {header!r:.80} names no holder, life and lease")
        return cls("start", group, holder, int(life), None if lease == "-" else lease)


class _Record(Event, frozen=True, kw_only=True):
    """`life` is the number of the start under which it was written, which rises from start to start of a group: records
    of a lower one than the last start's are those of a process that another one has replaced."""

    group: str
    life: Count

    def check(self) -> None:
        if not is_group_id(self.group):
            raise SchemaError(f"group: {self.group[:60]!r} is not 32 hex digits")


class GroupStart(_Record, frozen=True, kw_only=True):
    """A process begins to work on a group, or goes on where another life left it; stored before any call of it.

    `holder` is the process, in its `life` of that number. `producer`, `epoch` and `counter` are those that the rollout
    will have, whichever life publishes it, as it will have the id `group`. `item` names the task and `dispatch` its
    index and why it was drawn; None: tasks have no index. `claim` is the place of the epoch that the group is for.
    `fruitless`: how many starts in a row have added no record. `known_seq`: the sequence of the last record that this
    life goes on from, 0 for a new group. What lies between it and this start was written by a process that had lost the
    group, and was handed out to no caller: it is no part of the group.
    """

    run: str
    env: str
    holder: str
    producer: str
    epoch: Count
    counter: Count
    item: str
    samples: Annotated[int, Meta(ge=1)]
    tokenizer_hash: str
    started_ns: Count
    lease: str | None = None
    dispatch: Dispatch | None = None
    claim: EpochClaim | None = None
    fruitless: Count = 0
    known_seq: Count = 0

    def check(self) -> None:
        super().check()
        for name, text in (("holder", self.holder), ("producer", self.producer), ("lease", self.lease)):
            if text is not None and not is_word(text):
                raise SchemaError(f"{name}: {text[:60]!r} is not 1 to 128 visible ASCII characters, or is '-'")


class SessionCall(_Record, frozen=True, kw_only=True):
    """One answer of the model: P new tokens of the prompt, then T sampled ones.

    `session` is one attempt at a sample and `index` counts its calls from 0. The prompt is that of the call `parent` of
    the same session, its sampled tokens, and then `prompt` int32 [P]; `parent` None: `prompt` is all of it. `tokens`
    int32 [T] and `logprobs` float32 [T], the stop token included. `versions`: (position in `tokens`, policy version)
    from there on, the first at 0. `digest` is that of the request: the same request of the same place gets this answer
    again. `fork` names the branch of the conversation that it belongs to by the numbers of the forks that lead there,
    "0.2" for the third fork of the first one, say; "": the conversation itself. `seconds` is how long the answer took
    to generate. `columns` hold further rows, of the tokens whose rows the
    parent's lack: routed_experts int16 [rows, W]; sampling_mask int32 [T, W], padded with -1.
    `is_constrained`: the text had to match something, so the logprobs are those of what was allowed, and the answer is
    not trained on.
    """

    session: str
    index: Count
    parent: Count | None
    digest: bytes
    prompt: bytes
    tokens: bytes
    logprobs: bytes
    versions: list[tuple[Count, str]]
    finish_reason: Literal["stop", "length"]
    text: str
    fork: str = ""
    seconds: Seconds = 0.0
    columns: dict[str, Column] = {}
    is_constrained: bool = False

    @property
    def n_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.tokens) // 4

    def check(self) -> None:
        super().check()
        _check_session(self.session)
        if self.parent is not None and self.parent >= self.index:
            raise SchemaError(f"parent: call {self.parent} does not come before call {self.index}")
        _check_fork(self.fork)
        if not _DIGEST_BYTES[0] <= len(self.digest) <= _DIGEST_BYTES[1]:
            raise SchemaError(
                f"digest: {len(self.digest)} bytes; {_DIGEST_BYTES[0]} to {_DIGEST_BYTES[1]} name a request"
            )
        if not self.n_tokens:
            raise SchemaError("tokens: empty; an answer has one at least")
        view(self.prompt, "int32", len(self.prompt) // 4, "prompt")
        view(self.tokens, "int32", self.n_tokens, "tokens")
        if not np.isfinite(view(self.logprobs, "float32", self.n_tokens, "logprobs")).all():
            raise SchemaError("logprobs: must be finite")
        starts = [start for start, _ in self.versions]
        if not starts or starts[0] or starts != sorted(set(starts)) or starts[-1] >= self.n_tokens:
            raise SchemaError(f"versions: {starts[:8]} are no rising positions of {self.n_tokens} tokens from 0 on")
        for _, version in self.versions:
            PolicyVersion.parse(version)


class ToolResults(_Record, frozen=True, kw_only=True):
    """What the tools answered that the call `index` of a session has called, in the order of the calls.

    None: of a tool that may run again. `fork`: the branch in which they ran, as in `SessionCall`; branches that begin
    at this call each run its tools.
    """

    session: str
    index: Count
    results: list[str | None]
    fork: str = ""
    seconds: Seconds = 0.0

    def check(self) -> None:
        super().check()
        _check_session(self.session)
        _check_fork(self.fork)


class SessionEnd(_Record, frozen=True, kw_only=True):
    """A sample is finished: it is neither generated nor scored by its environment again.

    `rewards` are those that its environment gave, by component. `messages` is the conversation, `calls` the indexes of
    the calls that its sequence consists of, `further` those of each other sequence of the sample, in the order of the
    rollout, `thought_calls` as in the group's metadata. `turn_rewards`: (index of a call, its reward), ascending.
    """

    session: str
    sample: Count
    finish_reason: FinishReason
    rewards: dict[str, Finite | None]
    calls: list[Count]
    further: list[list[Count]] = []
    messages: list[Message] = []
    thought_calls: Count = 0
    turn_rewards: list[tuple[Count, Finite]] = []
    diverged: str | None = None

    def check(self) -> None:
        super().check()
        _check_session(self.session)


class GroupEnd(_Record, frozen=True, kw_only=True):
    """No process works on the group any more: its calls may be deleted.

    stored: it is a rollout. abandoned: nothing of it is used, for `reason`; `lost_s` seconds of generation were in
    vain.
    """

    outcome: Literal["stored", "abandoned"]
    reason: str | None = None
    lost_s: Seconds = 0.0


class TakeUpRequest(Event, frozen=True, kw_only=True):
    """Asks the governor for a group of an environment that another life has left behind, or for more of its records.

    `group` None: any that is free; the next `GroupStart` of `life` makes it the asking process's. Otherwise the records
    of that group stored behind sequence `after`.
    """

    env: str
    holder: str
    life: Count
    group: str | None = None
    after: Count = 0

    def check(self) -> None:
        if not is_word(self.holder):
            raise SchemaError(f"holder: {self.holder[:60]!r} is not 1 to 128 visible ASCII characters, or is '-'")


class StoredRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record as it is stored at `seq` of CALLS."""

    seq: Count
    kind: RecordKind
    data: bytes


class TakeUpReply(Event, frozen=True, kw_only=True):
    """`group` None: nothing is left behind. `more`: records follow behind the last one."""

    group: str | None = None
    records: list[StoredRecord] = []
    more: bool = False


def _check_session(session: str) -> None:
    if not is_word(session):
        raise SchemaError(f"session: {session[:60]!r} is not 1 to 128 visible ASCII characters, or is '-'")


def _check_fork(fork: str) -> None:
    if len(fork) > MAX_FORK_CHARS or not _FORK.fullmatch(fork):
        raise SchemaError(f"fork: {fork[:60]!r} is not at most {MAX_FORK_CHARS} digits with dots between them")
