"""What a group weighs on the wire with its texts, and what hostile packing meets."""

import random
import tracemalloc
import zlib
from importlib.metadata import distributions
from pydoc_data.topics import topics
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.schemas.codec import decode, encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ids import PolicyVersion, new_group_id
from lachesis.schemas.packing import deflate, inflate, join_tokens, pack_mask, split_tokens
from lachesis.schemas.planning_header import PLAN_HEADER, TRACEPARENT_HEADER, Plan, traceparent
from lachesis.schemas.rollout import Message, PackedGroup, RolloutGroup, Sequences, VersionSpan

CORPORA = {
    "the Python reference": "\n".join(topics[name] for name in sorted(topics)),
    "package descriptions": "\n".join(
        sorted({(found.read_text("METADATA") or "").partition("\n\n")[2] for found in distributions()})
    ),
}
"""English prose, some of it code: about what a model writes. It must not repeat itself more than a model would."""


def talks(corpus: str, n: int, length: int, prompt: int, seed: int) -> list[list[Message]]:
    """`n` conversations of `length` characters: one prompt, and answers from different places of the corpus."""
    rng = random.Random(seed)

    def piece(size: int) -> str:
        start = rng.randrange(len(corpus) - size)
        return corpus[start : start + size]

    ask = Message(role="user", content=piece(prompt))
    return [[ask, Message(role="assistant", content=piece(length - prompt))] for _ in range(n)]


def group_of(
    messages: list[list[Message]], tokens: int = 1024, prompt: int = 128, vocabulary: int = 150_000, seed: int = 0
) -> RolloutGroup:
    """A group of one sample a conversation. Random tokens and logprobs: no real ones are harder to pack."""
    rng = np.random.default_rng(seed)
    n = len(messages)
    mask = np.tile(np.arange(tokens) >= prompt, n)
    sequences = Sequences(
        offsets=as_bytes(np.arange(n + 1) * tokens, "int32"),
        tokens=as_bytes(rng.integers(0, vocabulary, n * tokens), "int32"),
        loss_mask=pack_mask(mask),
        logprobs=as_bytes(np.where(mask, -rng.exponential(1.0, n * tokens), 0), "float32"),
        finish_reasons=["stop"] * n,
        version_spans=[VersionSpan(i, 0, 0) for i in range(n)],
        rewards={"accuracy": [0.5] * n},
    )
    return RolloutGroup(
        id=new_group_id(), run="run-2026", env="spell_backward", item="train/000123456",
        producer="environment-0-4f2a", epoch=1_795_262_854, counter=123_456,
        policy_versions=[str(PolicyVersion(12, "a1b2c3d4", "0123456789abcdef"))], sequences=sequences,
        tokenizer_hash="9f" * 16, started_ns=1_795_262_854_000_000_000, lease="lease-12345", skill="length-5",
        difficulty=0.5, task={"answer": "drow", "metadata": {"length": 4}}, messages=messages,
        generation={"temperature": 1.0, "max_tokens": tokens}, metadata={"inference_ms": 812.5},
    )  # fmt: skip


def wire(group: RolloutGroup, **changes: Any) -> bytes:
    """The group as it travels, with some of its fields replaced there."""
    raw = msgspec.msgpack.decode(encode(group))
    for name, value in changes.items():
        (raw if name in {"packed_messages", "messages"} else raw["sequences"])[name] = value
    return msgspec.msgpack.encode(raw)


# -- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("prompt", [1, 128, 512])
def test_8_times_1024_tokens_with_their_texts_weigh_70_kib_at_most(corpus: str, prompt: int) -> None:
    for seed in range(20):
        group = group_of(talks(CORPORA[corpus], 8, 4096, 4 * prompt, seed), prompt=prompt, seed=seed)
        headers = {
            "Nats-Msg-Id": f"rollout.{group.id}",
            PLAN_HEADER: Plan.of(group).pack(),
            TRACEPARENT_HEADER: traceparent(group.id, sampled=True),
        }
        framing = sum(len(name) + len(value) + 4 for name, value in headers.items()) + 100  # subject, protocol
        data = encode(group)
        assert len(data) + framing <= 70 * 1024
        texts = len(msgspec.msgpack.encode(group.messages))
        assert texts >= 8 * 4096
        if prompt == 1:  # it is prose that is packed, not something that repeats itself
            assert texts < 4 * len(msgspec.msgpack.decode(data)["packed_messages"])
        back = decode(RolloutGroup, data)
        assert back == group


def test_short_texts_travel_plain() -> None:
    group = group_of([[Message(role="user", content="2+2?"), Message(role="assistant", content="4")]] * 8, 16, 4)
    raw = msgspec.msgpack.decode(encode(group))
    assert raw["packed_messages"] is None
    assert len(raw["messages"]) == 8
    assert decode(RolloutGroup, encode(group)) == group


def test_texts_longer_than_any_reader_unpacks_travel_plain() -> None:
    group = group_of([[Message(role="assistant", content="so " * 40_000)]], 16, 4)
    assert msgspec.msgpack.decode(encode(group))["packed_messages"] is None
    assert decode(RolloutGroup, encode(group)) == group


# -- round trips -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 300), min_size=1, max_size=70))
def test_token_ids_come_back(ids: list[int]) -> None:
    tokens = as_bytes(ids, "int32")
    halves = split_tokens(tokens)
    assert halves is not None
    low, high = halves
    assert len(low) == 2 * len(ids)
    assert len(high) == max((max(ids) >> 16).bit_length(), 0) * ((len(ids) + 7) // 8)
    assert join_tokens(low, high) == tokens


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=400)), min_size=1, max_size=12),
    st.integers(1, 100_000_000),
)
def test_groups_come_back(conversation: list[tuple[str, str]], vocabulary: int) -> None:
    messages = [[Message(role=role, content=content) for role, content in conversation]] * 3
    group = group_of(messages, 9, 2, vocabulary)
    back = decode(RolloutGroup, encode(group))
    assert back == group
    assert encode(back) == encode(group)


def test_columns_are_views_of_what_was_read() -> None:
    group = decode(RolloutGroup, encode(group_of(talks(CORPORA["the Python reference"], 2, 2000, 100, 0))))
    for sequence in group.sequences:
        for column in (sequence.tokens, sequence.logprobs):
            assert not column.flags.owndata
            assert not column.flags.writeable
        assert (sequence.tokens.dtype, sequence.logprobs.dtype) == (np.int32, np.float32)


def test_a_group_published_plain_is_read_as_well() -> None:
    group = group_of(talks(CORPORA["the Python reference"], 2, 2000, 100, 0))
    plain = msgspec.msgpack.encode(group)  # as a writer without packing has it
    assert b"packed_messages\xc0" in plain
    assert b"token_bits" not in plain
    assert decode(RolloutGroup, plain) == group
    assert len(encode(group)) < 0.8 * len(plain)


# -- hostile bytes ---------------------------------------------------------------------------------------------------

GROUP = group_of(talks(CORPORA["the Python reference"], 3, 1000, 100, 0), 16, 4)
PACKED = msgspec.msgpack.decode(encode(GROUP))["packed_messages"]
MOST = (1 << 16) + 64 * 48


@pytest.mark.parametrize(
    ("tokens", "bits"),
    [
        (b"\0" * 95, b""),
        (b"\0" * 96, b"\0"),
        (b"\0" * 96, b"\0" * (6 * 16)),
        (b"\0" * 96, b"\0" * 13),
        (b"", b"\0"),
        (b"", b""),
        (b"\0" * 94, b""),
        (b"\0" * 98, b""),
        (GROUP.sequences.tokens, b""),
    ],
)  # fmt: skip
def test_token_columns_that_do_not_fit(tokens: bytes, bits: bytes) -> None:
    with pytest.raises(SchemaError, match=r"token_bits|offsets"):
        decode(RolloutGroup, wire(GROUP, tokens=tokens, token_bits=bits))


def bomb(size: int) -> bytes:
    """`size` zero bytes, compressed about a thousandfold."""
    stream = zlib.compressobj(9)
    return b"".join(stream.compress(b"\0" * (1 << 20)) for _ in range(size >> 20)) + stream.flush()


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (PACKED[:-1], "not one whole zlib stream"),
        (PACKED[:-40], "not one whole zlib stream"),
        (PACKED + b"x", "not one whole zlib stream"),
        (PACKED + PACKED, "not one whole zlib stream"),
        (PACKED[:30] + bytes([PACKED[30] ^ 255]) + PACKED[31:], "packed_messages"),
        (b"", "not one whole zlib stream"),
        (b"plain", "packed_messages"),
        (deflate(b""), "packed_messages"),
        (deflate(b"\xdd\xff\xff\xff\xff"), "packed_messages"),
        (deflate(b"\x91" * 60_000 + b"\xc0"), "packed_messages"),
        (deflate(b"\xdc\xff\xff" + b"\x90" * 65535), "65535 conversations for 3"),
        (deflate(msgspec.msgpack.encode([[{"role": "user", "content": 1}]])), "packed_messages"),
        (deflate(b"\xc1" * (MOST + 1)), f"more than the {MOST} allowed"),
        (bomb(64 << 20), f"more than the {MOST} allowed"),
    ],
)  # fmt: skip
def test_packed_messages_that_cannot_be_right(packed: bytes, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        decode(RolloutGroup, wire(GROUP, packed_messages=packed))


def test_messages_are_not_given_twice() -> None:
    with pytest.raises(SchemaError, match="twice"):
        decode(RolloutGroup, wire(GROUP, messages=[[], [], []]))


@pytest.mark.slow
def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    data = wire(GROUP, packed_messages=bomb(256 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(SchemaError, match="unpack to more"):
            decode(RolloutGroup, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * (MOST + len(data))  # of 256 MiB


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_packed_messages_raise_schema_errors_only(data: bytes, compressed: bool) -> None:
    try:
        decode(RolloutGroup, wire(GROUP, packed_messages=deflate(data) if compressed else data))
    except SchemaError:
        return


@given(st.binary(max_size=300), st.integers(0, 400))
def test_what_is_unpacked_is_never_more_than_allowed(data: bytes, most: int) -> None:
    try:
        assert inflate(deflate(data), most, "it") == data
    except SchemaError:
        assert len(data) > most
    else:
        assert len(data) <= most


def test_a_packed_group_has_all_but_the_texts_and_unpacks_them_when_requested() -> None:
    whole, packed = decode(RolloutGroup, encode(GROUP)), decode(PackedGroup, encode(GROUP))
    assert (packed.messages, packed.sequences) == ([], whole.sequences)
    assert packed.with_texts().messages == whole.messages == GROUP.messages
    plain = decode(PackedGroup, encode(GROUP.replace(messages=GROUP.messages[:0])))
    assert plain.with_texts() is plain


def test_a_packed_group_refuses_columns_at_once_and_texts_when_they_are_unpacked() -> None:
    with pytest.raises(SchemaError, match="tokens"):
        decode(PackedGroup, wire(GROUP, tokens=b"123"))
    for texts, says in ((b"plain", "packed_messages"), (deflate(msgspec.msgpack.encode([[]])), "1 conversations")):
        packed = decode(PackedGroup, wire(GROUP, packed_messages=texts))
        with pytest.raises(SchemaError, match=says):
            packed.with_texts()
