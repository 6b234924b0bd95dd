"""Defines the rollout group: one message, published once, immutable; every other event refers to it.

A group holds the samples drawn for one item: their tokens as columns (`sequences`), their texts as conversations.

A group travels packed: `to_wire` leaves out what its sequences begin with alike (`repeats`), narrows the token ids
(`token_bits`) and compresses the texts (`packed_messages`), and `from_wire` undoes all three, so that none of these
fields is ever set in a group that was read. A group published without them, which is simpler, is read as well. A
trainer, which seldom needs texts, reads a `PackedGroup`.
"""

import math
import re
from functools import cached_property
from typing import Any, Self

import msgspec

from lachesis.schemas.codec import MAX_ERROR_CHARS, UNREADABLE, Event
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ids import PolicyVersion, is_group_id
from lachesis.schemas.packing import deflate, inflate
from lachesis.schemas.repeats import REPEATS_SINCE
from lachesis.schemas.sequences import (
    EXCLUDED_SINCE,
    UNTRAINABLE_SINCE,
    FinishReason,
    Sequences,
    TokenSequence,
    VersionSpan,
)
from lachesis.schemas.values import Count, Finite, check_plain

__all__ = [
    "Attachment",
    "Dispatch",
    "FinishReason",
    "Message",
    "PackedGroup",
    "RolloutGroup",
    "Sequences",
    "TokenSequence",
    "ToolCall",
    "VersionSpan",
    "is_word",
]

_MIN_COMPRESSED_CHARS = 512
"""Bytes of messages from which compressing them is worth its time."""
_TEXT_OF_GROUP = 1 << 16
_TEXT_OF_TOKEN = 64
"""Bytes that packed messages may unpack to: so many for a group and for each token of it. Longer ones travel plain."""
_WORD = re.compile(r"[!-~]{1,128}")  # what one field of the planning header may hold


def is_word(text: str) -> bool:
    """Return whether `text` can name a producer or a lease.

    1 to 128 visible ASCII characters, but not "-" alone.
    """
    return bool(_WORD.fullmatch(text)) and text != "-"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call of the model; `arguments` is the JSON text exactly as generated."""

    name: str
    arguments: str
    id: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chat message. `attachments` are indexes into the group's attachments."""

    role: str
    content: str
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    attachments: list[int] = []


class Attachment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes that belong to a message, an image say. A large group travels in chunks as a whole, so they stay inline."""

    mime: str
    data: bytes


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """Why this item was drawn: its index in the environment's pool, the snapshot and the probability it gave it."""

    index: Count
    snapshot_id: str
    probability: Finite


class RolloutGroup(Event, frozen=True, kw_only=True, dict=True):
    """All samples of one item under one policy (or several, see `version_spans`).

    `item` names the task drawn from the environment, `skill` and `difficulty` its place in the curriculum, `task` what
    a rater needs to judge it (reference answer, metadata). `messages` holds one conversation per sample.
    `producer`, `epoch`, `counter` make duplicates recognisable for ever: an epoch is one process life, the counter
    rises by one a group. `started_ns` is the Unix time at which the environment took the item up.
    `packed_messages`: on the wire alone, instead of `messages`: the same as msgpack, compressed with zlib.
    """

    id: str
    run: str
    env: str
    item: str
    producer: str
    epoch: int
    counter: int
    policy_versions: list[str]
    sequences: Sequences
    tokenizer_hash: str
    started_ns: int
    lease: str | None = None
    skill: str | None = None
    difficulty: Finite | None = None
    dispatch: Dispatch | None = None
    task: dict[str, Any] = {}
    messages: list[list[Message]] = []
    attachments: list[Attachment] = []
    generation: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    packed_messages: bytes | None = None

    @cached_property
    def versions(self) -> list[PolicyVersion]:
        """The versions it was made with. Raises `SchemaError` where one is malformed."""
        return [PolicyVersion.parse(text) for text in self.policy_versions]

    @property
    def policy_step(self) -> int:
        """The oldest step that it was made with."""
        return min(version.step for version in self.versions)

    @property
    def needs(self) -> int:
        if self.sequences.repeats:
            return REPEATS_SINCE
        if self.sequences.excluded_samples:
            return EXCLUDED_SINCE
        return 1 if self.sequences.logprobs is not None else UNTRAINABLE_SINCE

    def to_wire(self) -> Self:
        return self.with_packed_texts().replace(sequences=self.sequences.narrowed())

    def with_packed_texts(self) -> Self:
        """Return the group with its texts as they travel, for one that is encoded several times."""
        text = _messages_encoder.encode(self.messages)
        if not _MIN_COMPRESSED_CHARS <= len(text) <= _most_text(self.sequences):
            return self
        return self.replace(messages=[], packed_messages=deflate(text))

    def from_wire(self, data: bytes | memoryview) -> Self:
        changes: dict[str, Any] = self._whole_columns()
        if self.packed_messages is not None:
            changes |= {"messages": self._unpacked_texts(changes["sequences"]), "packed_messages": None}
        return self.replace(**changes)

    def _whole_columns(self) -> dict[str, Any]:
        """Return the fields with the columns as their users know them. Raises `SchemaError` where they cannot be."""
        whole = {"sequences": self.sequences.widened()}
        if not self.sequences.repeats:
            return whole
        return whole | {"v": 1}  # it was raised for the form that travelled; `needs` raises it again

    def with_texts(self) -> Self:
        """Return the group with its texts unpacked. Raises `SchemaError` where they cannot be."""
        if self.packed_messages is None:
            return self
        unpacked = self.replace(messages=self._unpacked_texts(self.sequences), packed_messages=None)
        unpacked.check_texts()
        return unpacked

    def _unpacked_texts(self, widened: Sequences) -> list[list[Message]]:
        """Return the texts of a group with the columns `widened`, which bound what they may unpack to."""
        if self.messages:
            raise SchemaError("messages: given twice, plain and packed")
        text = inflate(self.packed_messages or b"", _most_text(widened), "packed_messages")
        try:
            return _messages_decoder.decode(text)
        except UNREADABLE as error:
            raise SchemaError(f"packed_messages: {str(error)[:MAX_ERROR_CHARS]}") from error

    def check(self) -> None:
        if not is_group_id(self.id):
            raise SchemaError(f"id: {self.id[:60]!r} is not 32 hex digits")
        if not all(0 <= number < 1 << 63 for number in (self.epoch, self.counter, self.started_ns)):
            raise SchemaError("epoch, counter, started_ns: must be from 0 to 2^63 - 1")
        for name, text in (("producer", self.producer), ("lease", self.lease)):
            if text is not None and not is_word(text):
                raise SchemaError(f"{name}: {text[:60]!r} is not 1 to 128 visible ASCII characters, or is '-'")
        if not self.versions:
            raise SchemaError("policy_versions: empty; a rollout without its policy cannot be trained on")
        self.sequences.check()
        self._check_spans()
        self.check_texts()
        if self.difficulty is not None and not math.isfinite(self.difficulty):
            raise SchemaError(f"difficulty: {self.difficulty}; an unknown one is None")
        for what in ("task", "generation", "metadata"):
            check_plain(what, getattr(self, what))

    def check_texts(self) -> None:
        """Raise `SchemaError` unless the conversations fit the samples and the attachments."""
        if self.messages and len(self.messages) != self.sequences.n_samples:
            raise SchemaError(f"messages: {len(self.messages)} conversations for {self.sequences.n_samples} samples")
        referred = {i for talk in self.messages for message in talk if message.attachments for i in message.attachments}
        if not referred.issubset(range(len(self.attachments))):
            raise SchemaError(f"messages: an attachment index is outside the {len(self.attachments)} attachments")

    def _check_spans(self) -> None:
        cuts = self.sequences.cuts().tolist()
        versions, sequences = len(self.policy_versions), len(self.sequences)
        begun = set()
        for span in self.sequences.version_spans:
            sequence, start = span.sequence, span.start
            if not 0 <= span.version < versions:
                raise SchemaError(f"version_spans: version {span.version} of {versions}")
            if not 0 <= sequence < sequences:
                raise SchemaError(f"version_spans: sequence {sequence} of {sequences}")
            if not 0 <= start < cuts[sequence + 1] - cuts[sequence]:
                raise SchemaError(f"version_spans: token {start} lies outside sequence {sequence}")
            if start == 0:
                begun.add(sequence)
        if len(begun) != sequences:
            raise SchemaError("version_spans: each sequence needs a span that starts at its token 0")


class PackedGroup(RolloutGroup, frozen=True, kw_only=True, dict=True):
    """A group whose texts stay as they travel, which halves the time to read it. `with_texts` unpacks them."""

    def from_wire(self, data: bytes | memoryview) -> Self:
        return self.replace(**self._whole_columns())


def _most_text(sequences: Sequences) -> int:
    return _TEXT_OF_GROUP + _TEXT_OF_TOKEN * sequences.n_tokens


_messages_encoder = msgspec.msgpack.Encoder()
_messages_decoder = msgspec.msgpack.Decoder(list[list[Message]])
