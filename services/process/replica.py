"""The name of a process among those of its service: a number that was given, else the host's name."""

import re
import socket

__all__ = ["replica_name"]


def replica_name(number: int | None, host: str | None = None) -> str:
    """Return `number`, if one was given, else the host's name.

    That is unique among containers and among machines. It is part of the identity of producers and in
    telemetry: two processes with one name would be taken for one.
    """
    if number is not None:
        return str(number)
    return re.sub(r"[^A-Za-z0-9_-]", "-", host or socket.gethostname())[:64]
