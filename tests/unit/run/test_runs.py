"""The state of a run, its results and its logs, out of what lies in its folder."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.notices import Notice
from lachesis.services.cli.options import _run_name
from lachesis.services.observe.run_logs import follow_logs, log_files, newest_lines
from lachesis.services.observe.run_results import results_of
from lachesis.services.observe.run_state import EnvRates
from lachesis.services.observe.runs import look_at_folder, look_at_runs, state_of_run
from lachesis.services.output import print_json
from lachesis.services.run import notices_file
from lachesis.services.run.known_runs import known_runs, register_run
from lachesis.services.run.notices_file import NoticesWriter
from lachesis.services.run.run_file import write_run_file
from lachesis.services.run.supervisor_state import (
    KEEPER_FILE,
    STATE_FILE,
    ProcessRecord,
    SupervisorState,
    SupervisorStateWriter,
    read_record,
)

PROCESS = '{"pid": %d, "host": "h", "machine": "m", "started": 1, "begun_ns": %d}'
SUPERVISOR = f'{{"process": {PROCESS}, "phase": "running", "ready": 1, "processes": 2}}'
HERE = ProcessRecord.current()
DEAD = msgspec.structs.replace(HERE, started=HERE.started - 1)  # the pid of this process, of an earlier one
ELSEWHERE = msgspec.structs.replace(HERE, machine="another", host="far")


def state(phase: str, process: ProcessRecord = HERE) -> SupervisorState:
    return SupervisorState(process=process, phase=phase, ready=1, processes=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("unknown", {}),
        ("running", {"state": state("running"), "supervisor_runs": True}),
        ("starting", {"state": state("starting"), "supervisor_runs": True, "ended": "finished"}),
        ("stopping", {"state": state("stopping"), "supervisor_runs": True}),
        ("stopping", {"state": state("ended"), "supervisor_runs": True}),
        ("restarting", {"state": state("running"), "keeper_runs": True}),
        ("stopping", {"state": state("ended"), "keeper_runs": True}),
        ("starting", {"keeper_runs": True}),
        ("interrupted", {"state": state("running"), "ended": "finished"}),
        ("interrupted", {"state": state("stopping")}),
        ("elsewhere", {"state": state("running"), "supervisor_runs": None}),
        ("finished", {"state": state("ended"), "ended": "finished"}),
        ("stopped", {"state": state("ended"), "ended": "stopped"}),
        ("failed", {"state": state("ended"), "ended": "failed"}),
        ("stopped", {"state": state("ended"), "ended": "interrupted"}),
        ("unknown", {"state": state("ended"), "ended": "a word of another build"}),
        ("half deleted", {"state": state("running"), "supervisor_runs": True, "deleting": True}),
    ],
)
def test_the_state_of_a_run(expected: str, given: dict[str, Any]) -> None:
    nothing = {"deleting": False, "state": None, "supervisor_runs": False, "keeper_runs": False, "ended": "unknown"}
    assert state_of_run(**{**nothing, **given}) == expected


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = tmp_path / "runs" / "mine"
    made.mkdir(parents=True)
    return made


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_bytes(msgspec.json.encode(content))


def test_a_process_of_the_same_pid_is_not_taken_for_the_supervisor(folder: Path) -> None:
    write(folder, STATE_FILE, state("running"))
    assert look_at_folder("mine", folder).supervisor == os.getpid()
    write(folder, STATE_FILE, state("running", DEAD))
    found = look_at_folder("mine", folder)
    assert (found.state, found.supervisor) == ("interrupted", None)
    assert "lachesis runs start mine" in str(found.problem)
    write(folder, KEEPER_FILE, HERE)
    assert look_at_folder("mine", folder).state == "restarting"
    write(folder, KEEPER_FILE, DEAD)
    write(folder, STATE_FILE, state("running", ELSEWHERE))
    assert "started on far" in str(look_at_folder("mine", folder).problem)


@pytest.mark.parametrize("damage", [b"", b"{", b"\x00", b'{"pid": "x"}', b"[]", b'{"phase": "running"}'])
def test_damaged_files_are_as_none(folder: Path, damage: bytes) -> None:
    for name in (STATE_FILE, KEEPER_FILE, "summary.json", "pids.json", "metrics.jsonl"):
        (folder / name).write_bytes(damage)
    assert look_at_folder("mine", folder).state == "unknown"


async def test_a_run_says_where_it_stands_and_what_it_came_to(folder: Path) -> None:
    config = RunConfig(run="mine", folder=str(folder), training=RunConfig().training)
    await write_run_file(config)
    rows = [
        {"train/step": float(n), "reward/mean": n / 10, "train/sequences": 4.0, "reward/sums/success": 0.5}
        | ({"eval/sums/avg@4": rate, "eval/sums/step": float(n)} if (rate := {1: 0.2, 5: 0.9, 9: 0.7}.get(n)) else {})
        for n in range(1, 11)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(folder, STATE_FILE, state("ended", DEAD))
    write(folder, "summary.json", {"state": "failed", "reason": "no more", "gate": None})
    (found,) = look_at_runs()
    assert (found.run, found.state, found.problem, found.step) == ("mine", "failed", "no more", 10)
    assert found.rewards["sums"].success == 0.5
    results = results_of(config)
    totals = results.totals
    assert (totals.reward_first, totals.reward_last, totals.sequences) == (0.1, 1.0, 40)
    assert totals.held_out == {"sums": EnvRates(first=0.2, last=0.7, best=0.9)}


async def test_the_file_that_a_run_wrote_does_not_hide_the_one_that_it_was_started_with(folder: Path) -> None:
    config = RunConfig(run="mine", folder=str(folder))
    given = folder.parents[1] / "mine.toml"
    given.touch()
    own = await write_run_file(config)
    register_run(config, own)
    assert [one.config for one in known_runs()] == [str(own)]
    register_run(config, given)
    register_run(config, own)
    assert [one.config for one in known_runs()] == [str(given)]


@pytest.mark.outside
def test_who_started_the_supervisor_is_told_once_of_each_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(folder / "notify"))
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(folder / "notify"))
        writer = SupervisorStateWriter(folder)
        assert "NOTIFY_SOCKET" not in os.environ
        writer.report("starting", 0, 2, waits_for="governor")
        writer.report("starting", 0, 2, waits_for="governor")
        writer.report("running", 2, 2)
        first, second = listener.recv(1000), listener.recv(1000)
        assert first == b"STATUS=starting: 0 of 2 processes are ready, next governor"
        assert second == b"READY=1\nSTATUS=running"
    writer.report("stopping", 2, 2)  # no process listens any more
    found = read_record(folder / STATE_FILE, SupervisorState)
    assert found is not None
    assert (found.phase, found.process.pid) == ("stopping", os.getpid())


async def test_logs_are_followed_to_the_last_line_of_a_run_that_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "logs").mkdir()
    log = folder / "logs" / "trainer.log"
    log.write_text("one\ntwo\nthree")
    (folder / "supervisor.log").write_text("up\n")
    assert list(log_files(folder)) == ["supervisor", "trainer"]
    assert list(log_files(folder, ["trainer"])) == ["trainer"]
    assert newest_lines(log, 2) == ["two", "three"]
    assert newest_lines(log, 0) == []
    log.write_text("")
    looks: list[Callable[[], object]] = [
        lambda: log.write_text("four\nfi"),
        lambda: (folder / "logs" / "scorer.log").write_text("begun\n"),
        lambda: log.write_text("four\nfive\n"),
        lambda: write(folder, STATE_FILE, state("ended", DEAD)),
    ]
    write(folder, STATE_FILE, state("running"))
    monkeypatch.setattr("lachesis.services.observe.run_logs._LOOK_S", 0)
    real = look_at_folder

    def look(run: str, folder: Path) -> Any:
        if looks:
            looks.pop(0)()
        return real(run, folder)

    monkeypatch.setattr("lachesis.services.observe.run_logs.look_at_folder", look)
    seen = [line async for line in follow_logs("mine", folder)]
    assert seen == [("trainer", "four"), ("scorer", "begun"), ("trainer", "five")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pids.json", '{"scorer": 99999999999999999999999}'),
        ("pids.json", '{"scorer": 9223372036854775807}'),
        ("pids.json", '{"scorer": 0, "trainer": -1}'),
        (STATE_FILE, SUPERVISOR % (99999999999999999999999, 1)),
        (STATE_FILE, SUPERVISOR % (-1, 1)),
        (STATE_FILE, SUPERVISOR % (1, 99999999999999999999999)),
        (STATE_FILE, SUPERVISOR % (1, -99999999999999999999)),
        (KEEPER_FILE, PROCESS % (1 << 31, 1)),
    ],
)
def test_a_record_that_no_process_wrote_counts_for_nothing(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    found = look_at_folder("r", tmp_path)
    assert (found.state, found.pids, found.started_ns) == ("unknown", {}, None)


def test_a_folder_whose_name_no_run_can_have_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("good", os.fsdecode(b"bad\xff"), "bad\x1b[2J"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.toml").write_text('run = "good"\n')
    found = look_at_runs()
    print_json(found)
    assert [one["run"] for one in json.loads(capsys.readouterr().out)] == ["good"]


def test_a_run_that_goes_on_shows_what_its_supervisor_says_and_that_it_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice = Notice(key="ended", source="environment-words", what="environment-words ended with code 10")
    (tmp_path / STATE_FILE).write_bytes(msgspec.json.encode(state("running")))
    assert [one.source for one in look_at_folder("r", tmp_path).notices] == ["supervisor"]
    NoticesWriter(tmp_path).write([notice])
    assert look_at_folder("r", tmp_path).notices == [notice]
    monkeypatch.setattr(notices_file, "_FRESH_S", -1.0)  # it hangs since
    (said,) = look_at_folder("r", tmp_path).notices
    assert said.what == "supervisor is silent"
    (tmp_path / STATE_FILE).write_bytes(msgspec.json.encode(state("ended")))
    assert look_at_folder("r", tmp_path).notices == []


def test_a_run_may_be_named_by_the_path_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moved" / "one").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "moved" / "one")
    assert _run_name("moved/one") == f"{tmp_path}/moved/one"
    assert _run_name("./link") == f"{tmp_path}/link"
    assert _run_name("moved") == "moved", "a name stays a name"
    assert _run_name("no/where") == "no/where"
