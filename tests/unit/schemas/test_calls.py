"""The records of calls: what the header says, and what is refused."""

import pytest

from lachesis.schemas.calls import CallKey, GroupStart, SessionCall
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import SchemaError

GROUP = f"{7:032x}"


def call(**changes):
    fields = {
        "group": GROUP, "life": 1, "session": "0.0", "index": 1, "parent": 0, "digest": b"12345678",
        "prompt": as_bytes([1], "int32"), "tokens": as_bytes([3, 4], "int32"),
        "logprobs": as_bytes([-0.5, -1.0], "float32"), "versions": [(0, "0-a-b"), (1, "1-a-c")],
        "finish_reason": "stop", "text": "a",
    }  # fmt: skip
    return SessionCall(**fields | changes)


@pytest.mark.parametrize(
    "key", [CallKey("call", GROUP), CallKey("start", GROUP, "p", 7, "1-ab.3"), CallKey("start", GROUP, "p", 7)]
)
def test_what_a_header_says_comes_back(key) -> None:
    assert CallKey.unpack(key.pack()) == key


@pytest.mark.parametrize(
    "header",
    [None, "", "call", "call x", f"start {GROUP}", f"start {GROUP} p x -", f"call {GROUP} p 1 -", f"seek {GROUP}"],
)
def test_another_header_is_refused(header) -> None:
    with pytest.raises(SchemaError, match="Lachesis-Call"):
        CallKey.unpack(header)


def test_a_call_comes_back() -> None:
    assert decode(SessionCall, encode(call())) == call()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"group": "x"}, "group"),
        ({"session": "a b"}, "session"),
        ({"parent": 1}, "parent"),
        ({"digest": b"1"}, "digest"),
        ({"tokens": b"", "logprobs": b""}, "tokens"),
        ({"tokens": b"12345"}, "tokens"),
        ({"prompt": b"123"}, "prompt"),
        ({"logprobs": as_bytes([0.0], "float32")}, "logprobs"),
        ({"logprobs": as_bytes([0.0, float("nan")], "float32")}, "logprobs"),
        ({"versions": []}, "versions"),
        ({"versions": [(1, "0-a-b")]}, "versions"),
        ({"versions": [(0, "0-a-b"), (2, "1-a-b")]}, "versions"),
        ({"versions": [(0, "no version")]}, "policy version"),
    ],
)
def test_a_call_that_cannot_be_gone_on_from_is_refused(changes, named) -> None:
    with pytest.raises(SchemaError, match=named):
        decode(SessionCall, encode(call(**changes)))


def test_a_start_names_a_lease_that_a_header_can_hold() -> None:
    start = GroupStart(
        run="r", env="e", group=GROUP, life=1, holder="h", producer="p", epoch=1, counter=0, item="7", samples=2,
        tokenizer_hash="t", started_ns=1, lease="a b",
    )  # fmt: skip
    with pytest.raises(SchemaError, match="lease"):
        decode(GroupStart, encode(start))
