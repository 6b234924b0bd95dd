"""Names a process among those of its service: by a given number, else by the host's name.

Guarantees that processes without a number on one machine have different names: the second has the host's name and `-2`,
and so on. A name is free again when its process ends, however it ends.
"""

import errno
import hashlib
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

__all__ = ["claim_replica", "replica_name"]

log = logging.getLogger("lachesis")


def replica_name(number: int | None, host: str | None = None) -> str:
    """Return `number`, if one was given, else the host's name.

    That is unique among containers and among machines. It is part of the identity of producers and in telemetry: two
    processes with one name would be taken for one.
    """
    if number is not None:
        return str(number)
    return re.sub(r"[^A-Za-z0-9_-]", "-", host or socket.gethostname())[:64]


@contextmanager
def claim_replica(run: str, service: str, number: int | None, *, supervised: bool = False) -> Iterator[str]:
    """Yield the name of this process in `service`, which no other process here claims meanwhile.

    A number is taken as it is given; if another process here has it, that is logged. Processes on other machines are
    not seen here; their heartbeats show them, see `HeartbeatLog.shared_names`.
    """
    first = replica_name(number)
    with ExitStack() as held:
        if number is not None:
            if not _claim(held, run, service, first) and not supervised:  # the one before it may be about to end
                log.warning(
                    "another %s of run %s on this machine is replica %s as well: traces and metrics cannot tell the "
                    "two apart. Give each a --replica number of its own, or none",
                    service, run, first,
                )  # fmt: skip
            yield first
            return
        for place in count(1):
            name = first if place == 1 else f"{first[: 63 - len(str(place))]}-{place}"
            if _claim(held, run, service, name):
                yield name
                return


def _claim(held: ExitStack, run: str, service: str, name: str) -> bool:
    """Return whether the name was free; it is claimed until `held` is closed or the process has ended.

    What claims it is a socket in Linux' abstract space, which takes no file and goes with the process. That space is
    the network's, as the host's name is: containers that share the one share the other. Where there is no such space,
    every name counts as free.
    """
    digest = hashlib.sha256("\0".join((run, service, name)).encode()).hexdigest()[:32]
    with ExitStack() as unless_taken:
        try:
            claim = unless_taken.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            claim.bind(f"\0lachesis-replica-{digest}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        held.push(unless_taken.pop_all())
    return True
