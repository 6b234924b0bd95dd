"""Names of replicas: given numbers count, all others go by their host's name, in a container or not."""

import re
import socket

import pytest

from lachesis.services.process.replica import replica_name


@pytest.mark.parametrize(
    ("number", "host", "name"),
    [
        (3, "scorer-7d9f8-x2", "3"),
        (None, "scorer-7d9f8-x2.example", "scorer-7d9f8-x2-example"),
        (None, "gpu_07", "gpu_07"),
        (None, "h" * 80, "h" * 64),
    ],
)
def test_by_hand(number: int | None, host: str, name: str) -> None:
    assert replica_name(number, host) == name


def test_processes_on_two_machines_never_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for host in ("one", "two"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names.add(replica_name(None))
    assert names == {"one", "two"}
    monkeypatch.undo()
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", replica_name(None))
