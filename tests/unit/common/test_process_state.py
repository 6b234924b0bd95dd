"""The state of a process, also where its control group is frozen. The folders of the kernel are made up."""

import os
from pathlib import Path

import pytest

from lachesis.pipeline.common import process_state as module
from lachesis.pipeline.common.process_state import FROZEN, describe_stop, process_state


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(module, "_GROUPS", tmp_path / "cgroup")
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


_V1, _V2 = "6:freezer:/box\n0::/\n", "1:cpu:/\n0::/box\n"


@pytest.mark.parametrize(
    ("letter", "groups", "file", "state"),
    [
        ("D", _V1, ("freezer/box/freezer.state", "FROZEN\n"), FROZEN),
        ("D", _V1, ("freezer/box/freezer.state", "THAWED\n"), "D"),
        ("S", _V2, ("box/cgroup.events", "populated 1\nfrozen 1\n"), FROZEN),
        ("S", _V2, ("box/cgroup.events", "populated 1\nfrozen 0\n"), "S"),
        ("S", _V2, ("unified/box/cgroup.events", "populated 1\nfrozen 1\n"), FROZEN),
        ("R", _V2, ("box/cgroup.events", "populated 1\nfrozen 1\n"), "R"),
        ("S", "0::/other\n", ("box/cgroup.events", "populated 1\nfrozen 1\n"), "S"),
    ],
)
def test_a_frozen_control_group_is_seen(
    kernel: Path, letter: str, groups: str, file: tuple[str, str], state: str
) -> None:
    _write(kernel / "proc/7/stat", f"7 (a) name) {letter} 1 1")
    _write(kernel / "proc/7/cgroup", groups)
    _write(kernel / "cgroup" / file[0], file[1])
    assert process_state(7) == state


def test_what_stopped_a_process_is_named_with_how_it_goes_on() -> None:
    assert describe_stop(7, FROZEN)[0] == "the control group of its process 7 is frozen"
    assert describe_stop(7, "T") == ("a signal or a debugger stopped its process 7", "`kill -CONT 7` lets it go on")
    assert process_state(os.getpid()) in {"R", "S"}
