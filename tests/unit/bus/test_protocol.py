"""What a server sends is cut into the same messages wherever it is cut; nothing is taken for something else."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.bus.protocol import MAX_LINE_BYTES, Frame, FrameError, FrameReader, parse_headers

SENT = (
    b'INFO {"server_id":"a"}\r\n'
    b"MSG a.b 1 5\r\nhello\r\n"
    b"PING\r\n"
    b"MSG a.b 2 reply.to 0\r\n\r\n"
    b"HMSG a.b 3 23 28\r\nNATS/1.0\r\nname: one\r\n\r\nhello\r\n"
    b"HMSG\tb\x0cc 3  reply.to 12 12\r\nNATS/1.0\r\n\r\n\r\n"
    b"-ERR 'Permissions Violation'\r\n"
    b"MSG a 4 12\r\nMSG a 4 2\r\n\n\r\n"
)
FRAMES = [
    Frame(0, b"", b"", None, b'INFO {"server_id":"a"}'),
    Frame(1, b"a.b", b"", None, b"hello"),
    Frame(0, b"", b"", None, b"PING"),
    Frame(2, b"a.b", b"reply.to", None, b""),
    Frame(3, b"a.b", b"", b"NATS/1.0\r\nname: one\r\n\r\n", b"hello"),
    Frame(3, b"b\x0cc", b"reply.to", b"NATS/1.0\r\n\r\n", b""),
    Frame(0, b"", b"", None, b"-ERR 'Permissions Violation'"),
    Frame(4, b"a", b"", None, b"MSG a 4 2\r\n\n"),
]


def read(*pieces: bytes) -> list[Frame]:
    reader = FrameReader()
    return [frame for piece in pieces for frame in reader.feed(piece)]


def test_messages_and_lines_come_whole_and_in_order():
    assert read(SENT) == FRAMES


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 64])
def test_it_does_not_matter_where_the_bytes_are_cut(size):
    assert read(*(SENT[at : at + size] for at in range(0, len(SENT), size))) == FRAMES


TOKEN = st.binary(min_size=1, max_size=20).map(lambda raw: raw.translate(None, b" \t\r\n") or b"x")
MESSAGE = st.tuples(st.integers(1, 10**9), TOKEN, st.one_of(st.just(b""), TOKEN), st.none() | st.binary(), st.binary())


@pytest.mark.slow
@given(st.lists(MESSAGE, max_size=8), st.lists(st.integers(0, 2000), max_size=5))
def test_whatever_a_message_holds_it_comes_as_it_was_sent(messages, cuts):
    frames = [Frame(*message) for message in messages]
    sent = b""
    for one in frames:
        words = [b"MSG" if one.header is None else b"HMSG", one.subject, b"%d" % one.sid, one.reply]
        sizes = [b"%d" % (len(one.header or b"") + len(one.data))]
        if one.header is not None:
            sizes.insert(0, b"%d" % len(one.header))
        sent += b" ".join([word for word in words if word] + sizes) + b"\r\n" + (one.header or b"") + one.data + b"\r\n"
    edges = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    found = read(*(sent[a:b] for a, b in pairwise(edges)))
    assert found == [one._replace(header=one.header or None) for one in frames]


def test_who_stops_early_reads_the_rest_later():
    reader = FrameReader()
    assert next(iter(reader.feed(SENT))) == FRAMES[0]
    assert list(reader.feed(b"")) == FRAMES[1:]


@pytest.mark.parametrize(
    "sent",
    [b"HMSG a 1 9 4\r\nmore\r\n", b"MSG a 1 3\r\nmore\r\n", b"x" * (MAX_LINE_BYTES + 1)],
    ids=["header", "size", "line"],
)
def test_what_is_no_frame_is_an_error(sent):
    with pytest.raises(FrameError):
        read(sent)


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        (b"NATS/1.0\r\na: one\r\nb:two \r\na: three\r\n\r\n", {"a": "three", "b": "two"}),
        (b"NATS/1.0 404\r\n\r\n", {"Status": "404"}),
        (b"NATS/1.0 404 No Messages\r\n\r\n", {"Status": "404", "Description": "No Messages"}),
        (b"NATS/1.0 100 Idle Heartbeat\r\nX: 1\r\n\r\n", {"Status": "100", "Description": "Idle Heartbeat", "X": "1"}),
        (b"NATS/1.0\r\n\r\n", None),
        (b"", None),
        (b"\xff\xfe", None),
        (b"HTTP/1.0 200\r\na: b\r\n\r\n", None),
        (b"NATS/1.0\r\nno colon\r\ntwo words: 2\r\n\xc3\xa4: 3\r\n: 4\r\nd: \xff\r\n\r\n", {"d": "\ufffd"}),
    ],
)
def test_headers_are_read_and_what_is_none_is_left_out(block, headers):
    assert parse_headers(block) == headers
