"""What the command line reads and prints: stored events of strangers, and the files of a run's folder."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec
from fuzz.examples import EXAMPLES
from fuzz.mutate import mutate_json, mutate_msgpack, mutate_text
from fuzz.oracle import Target

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.embedded import read_endpoint
from lachesis.pipeline.errors import StartupError
from lachesis.schemas.annotations import DeadLetter
from lachesis.schemas.catalog import CHANNELS, channel_of
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli import dead
from lachesis.services.cli.events import FieldFilter, json_line, text_line, to_plain
from lachesis.services.output import printable

__all__ = ["targets"]


def targets(things: ExitStack) -> list[Target]:
    """Return the targets. An event's seed is its channel's number, and the event."""
    folder = Path(things.enter_context(tempfile.TemporaryDirectory()))
    events = [
        bytes([number]) + encode(example)
        for number, channel in enumerate(CHANNELS)
        for example in EXAMPLES
        if isinstance(example, channel.events)
    ]
    letters = [encode(example) for example in EXAMPLES if isinstance(example, DeadLetter)]
    endpoint = b'{"url": "nats://127.0.0.1:4222", "token": "t", "pid": 1}'
    return [
        Target("cli.events", events, lambda rng, good: good[:1] + mutate_msgpack(rng, good[1:]), _feed_event, weight=3),
        Target("cli.subject", [b"rl.score.r.live.sums", b"rl.blob.x"], mutate_text, _feed_subject),
        Target(
            "cli.where", [b"groups.item=7", b"subject=rl.score.r.live.sums"], mutate_text, _feed_where, (ConfigError,)
        ),
        Target("cli.dead", letters, mutate_msgpack, _feed_letter),
        Target(
            "cli.endpoint",
            [endpoint],
            mutate_json,
            lambda data: _feed_endpoint(folder, data),
            (StartupError,),
            weight=0.5,
        ),
    ]


def _feed_event(data: bytes) -> None:
    channel = CHANNELS[data[0] % len(CHANNELS)]
    message = StoredMessage("EVENTS", "rl.score.r.live.sums", 1, data[1:], 1)
    for full in (False, True):
        event = to_plain(message, channel, full=full)
        line = text_line(message, event)
        assert line.isprintable(), "control characters reach the terminal"
        msgspec.json.decode(json_line(message, event))


def _feed_subject(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return channel_of(text).name if channel_of(text) else "none"


def _feed_where(data: bytes) -> None:
    channel = next(channel for channel in CHANNELS if channel.name == "score")
    where = FieldFilter.parse(data.decode("utf-8", "replace"), [channel])
    for example in EXAMPLES:
        message = StoredMessage("EVENTS", "rl.score.r.live.sums", 1, encode(example), 1)
        where.matches(message, to_plain(message, channel))


def _feed_letter(data: bytes) -> None:
    letter = decode(DeadLetter, data)
    assert dead._when(letter)
    assert printable(letter.reason).isprintable()


def _feed_endpoint(folder: Path, data: bytes) -> None:
    (folder / "endpoint.json").write_bytes(data)
    endpoint = read_endpoint(folder)
    assert isinstance(endpoint.url, str)
