"""Names of replicas: given numbers count, containers go by their host's name."""

from pathlib import Path

import pytest

from lachesis.services.process import replica
from lachesis.services.process.replica import replica_name


@pytest.mark.parametrize(
    ("number", "environ", "name"),
    [
        (None, {}, "1"),
        (3, {}, "3"),
        (3, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "3"),
        (None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "scorer-7d9f8-x2-example"),
    ],
)
def test_by_hand(number: int | None, environ: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "_MARKS", ())
    assert replica_name(number, environ, "scorer-7d9f8-x2.example") == name


def test_a_container_goes_by_its_hosts_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    monkeypatch.setattr(replica, "_MARKS", (tmp_path / "mark",))
    assert replica_name(None, {}, "3f2a") == "3f2a"
