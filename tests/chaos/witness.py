"""What the servers acknowledged, noted by the processes that were answered, outside the servers.

The streams alone cannot tell that something is gone from them. A line is written, to a file opened for appending, as
soon as an acknowledgement has come and before the publisher hears of it, and outlives a SIGKILL.
"""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from integration.servers import RUN

from lachesis.pipeline.bus.api import PubAck
from lachesis.pipeline.bus.publisher import Publisher
from lachesis.pipeline.bus.routing import MSG_ID_HEADER
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.ids import PolicyVersion

__all__ = ["Acknowledged", "bear_witness", "read_witness"]

_POLICY = subjects.value_subject(RUN, keys.POLICY)


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """One acknowledgement, and when the message was first sent: the servers may have it long before they are heard.

    `note` is the policy version where a policy was published, else "-".
    """

    sent_ns: int
    stream: str
    seq: int
    duplicate: bool
    subject: str
    msg_id: str
    note: str

    @property
    def policy_step(self) -> int | None:
        """The step of the policy that was published, None where something else was."""
        return None if self.note == "-" else PolicyVersion.parse(self.note).step


def bear_witness(path: str) -> None:
    """Note every acknowledgement of this process in the file at `path`.

    A commit whose acknowledgement was lost finds its message stored, and that is noted as well.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    store, commit = Publisher.store, Publisher.commit
    heard: set[str] = set()

    def note(sent_ns: int, ack: PubAck, subject: str, data: bytes, msg_id: str) -> None:
        policy = decode(PolicyRecord, data).version if subject.startswith(_POLICY) else "-"
        fields = (sent_ns, ack.stream, ack.seq, int(ack.duplicate), subject, msg_id, policy)
        os.write(fd, (" ".join(map(str, fields)) + "\n").encode())
        heard.add(msg_id)

    async def noted(self: Publisher, subject: str, data: bytes, headers: Mapping[str, str]) -> PubAck:
        sent_ns = time.time_ns()
        ack = await store(self, subject, data, headers)
        note(sent_ns, ack, subject, data, headers[MSG_ID_HEADER])
        return ack

    async def committed(
        self: Publisher, stream: str, subject: str, data: bytes, *, expected: int, headers: Mapping[str, str]
    ) -> int:
        sent_ns = time.time_ns()
        seq = await commit(self, stream, subject, data, expected=expected, headers=headers)
        if headers[MSG_ID_HEADER] not in heard:
            note(sent_ns, PubAck(subjects.kind_of(stream), seq, duplicate=True), subject, data, headers[MSG_ID_HEADER])
        return seq

    Publisher.store = noted  # type: ignore[method-assign]
    Publisher.commit = committed  # type: ignore[method-assign]


def read_witness(path: Path) -> Iterator[Acknowledged]:
    """Yield what was noted, in the order of noting."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        sent_ns, stream, seq, duplicate, subject, msg_id, note = line.split(" ")
        yield Acknowledged(int(sent_ns), stream, int(seq), duplicate == "1", subject, msg_id, note)
