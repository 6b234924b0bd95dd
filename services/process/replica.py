"""The name of a process among those of its service.

A number on one machine, the host's name in containers.
"""

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

__all__ = ["replica_name"]

_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
"""Files that Docker and Podman put into containers."""


def replica_name(number: int | None, environ: Mapping[str, str] = os.environ, host: str | None = None) -> str:
    """Return `number`, if one was given.

    Else the host's name in a container, which is unique there, and 1 elsewhere.

    It is part of the identity of producers and in telemetry: two processes with one name would be taken for one.
    """
    if number is not None:
        return str(number)
    if "KUBERNETES_SERVICE_HOST" in environ or any(mark.exists() for mark in _MARKS):
        return re.sub(r"[^A-Za-z0-9_-]", "-", host or socket.gethostname())[:64]
    return "1"
