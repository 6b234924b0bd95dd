import errno
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lachesis.pipeline.common.stop_signals import stop_signals
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig, ServicesConfig
from lachesis.pipeline.errors import FencedError, OutOfMemoryError, SettingsChangedError, StartupError
from lachesis.schemas.control import StageVitals
from lachesis.services.cli import up
from lachesis.services.process.service_process import (
    EXIT_DRAIN_TIMEOUT,
    EXIT_DRAINED,
    EXIT_FENCED,
    EXIT_NO_MEMORY,
    EXIT_SETTINGS_CHANGED,
    EXIT_STARTUP,
    _explain,
)
from lachesis.services.supervisor.supervisor import Supervisor, has_survivors


async def test_who_was_drained_begins_anew_and_is_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(RunConfig(run="r", environments={"words": EnvironmentConfig(kind="gateway")}), [])
    supervisor.stop()  # so that no pause is waited for
    (row, *_), codes, lives = supervisor.running, [1, EXIT_DRAINED, -9, EXIT_DRAIN_TIMEOUT, 1], list[tuple[int, bool]]()

    async def run_once(_: object, *, anew: bool) -> tuple[int, bool]:
        lives.append((codes.pop(0), anew))
        row.stopping = not codes
        return lives[-1][0], True

    monkeypatch.setattr(supervisor, "_run_once", run_once)
    await supervisor._keep_running(row)
    assert lives == [(1, False), (EXIT_DRAINED, False), (-9, True), (EXIT_DRAIN_TIMEOUT, False), (1, True)]


@pytest.mark.parametrize(
    ("code", "how"), [(EXIT_SETTINGS_CHANGED, "cannot go on"), (EXIT_NO_MEMORY, "ran out of memory")]
)
async def test_what_another_start_does_not_change_ends_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, how: str
) -> None:
    config = RunConfig(run="r", folder=str(tmp_path), environments={"words": EnvironmentConfig(kind="gateway")})
    supervisor = Supervisor(config, [])
    (row, *_), lives = supervisor.running, list[int]()
    supervisor.logs.mkdir()
    log = supervisor.logs / f"{row.planned.name}.log"

    async def run_once(_: object, *, anew: bool) -> tuple[int, bool]:
        lives.append(code)
        row.up = True  # it was up before the settings were changed
        log.write_text("2026 ERROR normalization.window is 8 now\n")
        return code, True

    monkeypatch.setattr(supervisor, "_run_once", run_once)
    with pytest.raises(StartupError, match=rf"{how}:\n2026 ERROR normalization\.window is 8 now"):
        await supervisor._keep_running(row)
    assert lives == [code]


def test_a_changed_setting_has_an_exit_code_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    changed = SettingsChangedError("curriculum.strategy is 'pools' now")
    assert (
        _explain(BaseExceptionGroup("", [changed, SettingsChangedError("the same of another")]))
        == EXIT_SETTINGS_CHANGED
    )
    assert caplog.messages == ["curriculum.strategy is 'pools' now", "the same of another"]
    assert _explain(BaseExceptionGroup("", [changed, StartupError("no server")])) == EXIT_STARTUP
    assert _explain(FencedError("another")) == EXIT_FENCED
    assert _explain(OutOfMemoryError("one sequence alone does not fit")) == EXIT_NO_MEMORY


def test_processes_left_by_a_killed_supervisor_are_gone_on_with(tmp_path: Path) -> None:
    assert not has_survivors(tmp_path)
    file = tmp_path / "pids.json"
    file.write_text('{"supervisor": 999999999, "nats-server": null}')
    assert not has_survivors(tmp_path)
    file.write_text(f'{{"supervisor": 999999999, "scorer": {os.getpid()}}}')
    assert has_survivors(tmp_path)
    file.write_text('{"supervisor": ')
    assert not has_survivors(tmp_path)


async def test_a_process_lives_from_when_the_machine_let_it_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lachesis.services.supervisor.supervisor._LOOK_S", 0.0)
    environments = {"words": EnvironmentConfig(kind="gateway")}
    supervisor = Supervisor(RunConfig(folder=str(tmp_path), environments=environments), [])
    row, refusals = supervisor.running[0], [errno.EMFILE, errno.EAGAIN]

    async def start(*_: object, anew: bool) -> None:
        if refusals:
            row.started_s = -100.0
            raise OSError(refusals.pop(0), "none is left")
        assert row.started_s > 0.0
        assert row.failing == "cannot be started, and is tried again: none is left"

    monkeypatch.setattr(supervisor, "_start", start)
    await supervisor._start_once_possible(row, tmp_path / "log", anew=False)
    assert not refusals


async def test_a_log_that_cannot_be_opened_ends_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    environments = {"words": EnvironmentConfig(kind="gateway")}
    supervisor = Supervisor(RunConfig(folder=str(tmp_path), environments=environments), [])
    monkeypatch.setattr("lachesis.services.supervisor.supervisor.read_tail", refuse)
    assert supervisor._last_lines(supervisor.running[0]) == ""


async def test_a_start_that_takes_too_long_says_what_each_process_was_at(tmp_path: Path) -> None:
    services = ServicesConfig(ready_s=0.01, drain_s=0.01)
    environments = {"words": EnvironmentConfig(kind="gateway")}
    supervisor = Supervisor(RunConfig(folder=str(tmp_path), environments=environments, services=services), [])
    rows = [row for row in supervisor.running if row.planned.service in {"scorer", "batcher"}]
    supervisor.logs.mkdir()
    for row in rows:
        if row.planned.service == "scorer":
            (supervisor.logs / "scorer.log").write_text("INFO one\nINFO loading raters\n")
            row.stages["scorer"] = StageVitals(state="starting", note="loading raters")
        else:
            row.ready.set()
    with pytest.raises(StartupError) as raised:
        await supervisor._ready(rows)
    text = str(raised.value)
    assert "services.ready_s" in text
    assert "scorer: is being started; its log ends: INFO loading raters" in text
    assert "batcher" not in text


async def test_the_end_of_a_terminal_stops_a_run_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    seen: list[list[str]] = []

    class Stoppable:
        def stop(self) -> None:
            calls.append("stop")

        def kill(self) -> None:
            calls.append("kill")

    @contextmanager
    def receive(*numbers: signal.Signals) -> Iterator[AsyncIterator[signal.Signals]]:
        async def sent() -> AsyncIterator[signal.Signals]:
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
                assert number in numbers
                yield number
                seen.append(list(calls))

        yield sent()

    monkeypatch.setattr(up.anyio, "open_signal_receiver", receive)
    await up.stop_on_signals(Stoppable())
    assert calls == ["stop", "kill"]
    assert seen[0] == ["stop"]  # the first one ended its loop: this is seen once the second one is requested


def test_who_ignores_the_end_of_a_terminal_still_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM)  # nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
