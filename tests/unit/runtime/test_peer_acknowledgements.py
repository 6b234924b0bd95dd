"""What services say was acknowledged to them is compared with the streams, and reported in their name."""

from types import SimpleNamespace

from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.runtime.peer_acknowledgements import PeerAcknowledgements
from lachesis.pipeline.runtime.stream_marks import BELIEVE_LOSS_S
from lachesis.schemas.subjects import EVENTS, ROLLOUTS


def beat(seq: int, service: str = "scorer", stream: str = ROLLOUTS):
    return SimpleNamespace(service=service, acknowledged={stream: seq}, pid=7, host="far")


def found(last: int) -> dict[str, StreamUsage]:
    usage = StreamUsage(messages=last, bytes=0, max_bytes=0, first=1, last=last)
    return {ROLLOUTS: usage, EVENTS: usage}


def test_a_stream_that_ends_before_what_a_service_stored_is_told_of_once_that_lasts():
    peers = PeerAcknowledgements()
    for now_s in range(int(BELIEVE_LOSS_S)):
        peers.hear(beat(9), now_s)
        assert peers.describe_lost(found(7), now_s) is None
    peers.hear(beat(9), BELIEVE_LOSS_S)
    said = peers.describe_lost(found(7), BELIEVE_LOSS_S)
    assert said is not None
    for part in (
        "scorer (process 7 of far)",
        "sequence 9 of ROLLOUTS",
        "ends at sequence 7",
        "2 acknowledged messages",
    ):
        assert part in said
    assert peers.describe_lost(found(9), BELIEVE_LOSS_S + 1) is None


def test_a_service_that_is_silent_or_says_what_is_so_is_not_told_of():
    peers = PeerAcknowledgements()
    peers.hear(beat(9), 0.0)
    peers.hear(beat(7, "teacher"), 0.0)
    peers.hear(beat(99, "teacher", "NONE"), 0.0)
    assert all(peers.describe_lost(found(7), now_s) is None for now_s in range(100))


def test_what_is_stored_while_the_streams_are_asked_is_not_missed():
    peers = PeerAcknowledgements()
    for asked_s in range(100):
        peers.hear(beat(asked_s + 8), asked_s + 0.5)
        assert peers.describe_lost(found(asked_s + 7), asked_s) is None


def test_what_services_say_is_bounded():
    peers = PeerAcknowledgements()
    for number in range(5000):
        peers.hear(beat(9, stream=f"NONE{number}"), 0.0)
    assert not peers._claims, "one service leaves room for the others"
    for number in range(5000):
        peers.hear(beat(9, f"service-{number}"), 0.0)
    assert len(peers._claims) <= 1024
